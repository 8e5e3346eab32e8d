"""Derivatives are refused when they are traced, by every public function, and the refusal costs the forward pass nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from functional_calls import CALLS, KINDS, arguments

import purepage as pp

DIFFERENTIATED = {
    "grad": lambda f, x: jax.grad(lambda x: jnp.sum(f(x)))(x),
    "grad of jit": lambda f, x: jax.grad(lambda x: jnp.sum(jax.jit(f)(x)))(x),
    "jit of grad": lambda f, x: jax.jit(jax.grad(lambda x: jnp.sum(f(x))))(x),
    "grad of remat": lambda f, x: jax.grad(lambda x: jnp.sum(jax.checkpoint(f)(x)))(x),
    "grad of scan": lambda f, x: jax.grad(lambda x: jnp.sum(jax.lax.scan(lambda c, _: (c, f(c)), x, None, length=2)[1]))(x),
    "jvp": lambda f, x: jax.jvp(f, (x,), (jnp.ones_like(x),)),
    "linearize": lambda f, x: jax.linearize(f, x)[0],
}


def of_first_float(name, kind):
    """(a function of the operation's first float argument, that argument); the result is all its float outputs as one vector."""
    arrays, static = arguments(name, kind)
    leaves, structure = jax.tree.flatten(arrays)
    place = next(i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating))

    def run(x):
        arrays = jax.tree.unflatten(structure, [*leaves[:place], x, *leaves[place + 1 :]])
        outs = jax.tree.leaves(CALLS[name](**arrays, **static))
        floats = [out.astype(jnp.float32).ravel() for out in outs if jnp.issubdtype(out.dtype, jnp.floating)]
        return jnp.concatenate([jnp.zeros(1), *floats])

    return run, leaves[place]


@pytest.mark.parametrize("mode", DIFFERENTIATED)
@pytest.mark.parametrize("name", ["paged_attention", "rotary_embedding"])
def test_every_way_to_a_derivative_is_one_clear_error(name, mode):
    function, x = of_first_float(name, "float32")
    with pytest.raises(pp.UnsupportedError, match=f"{name} has no derivatives"):
        jax.eval_shape(lambda x: DIFFERENTIATED[mode](function, x), x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CALLS)
def test_every_function_refuses_reverse_mode(name, kind):
    function, x = of_first_float(name, kind)
    with pytest.raises(pp.UnsupportedError, match="has no derivatives"):
        jax.eval_shape(lambda x: jax.grad(lambda x: jnp.sum(jax.jit(function)(x)))(x), x)


def test_what_does_not_depend_on_the_variable_is_no_error():
    function, x = of_first_float("paged_attention", "float32")
    gradient = jax.grad(lambda w: jnp.sum(w * function(jax.lax.stop_gradient(w * x))))(jnp.float32(2.0))
    np.testing.assert_allclose(gradient, jnp.sum(function(2.0 * x)), rtol=1e-5)


def test_the_refusal_leaves_no_trace_in_the_program():
    function, x = of_first_float("rotary_embedding", "float32")
    text = jax.jit(function).lower(x).as_text()
    assert "custom_jvp" not in text
    np.testing.assert_array_equal(jax.jit(function)(x), function(x))
