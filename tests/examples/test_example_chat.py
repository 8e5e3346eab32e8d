"""The example's conversation, prompt files and picture of the cache."""

import io
from types import SimpleNamespace

import pytest

for package in ("gguf", "tokenizers"):
    pytest.importorskip(package)

# ruff: noqa: E402
from examples.smollm2 import __main__ as command
from examples.smollm2.cache_map import PRINT_EVERY, CacheMap, cache_lines
from examples.smollm2.chat import Conversation
from examples.smollm2.scheduler import BlockPool, Scheduler, Sequence

STOP = 2


class Letters:
    """A tokenizer of one token a character, that knows the markers of turns."""

    stop_id = STOP

    def encode(self, text):
        ids = []
        while text:
            marker = next((m for m in ("<|im_start|>", "<|im_end|>") if text.startswith(m)), text[0])
            ids.append({"<|im_start|>": 1, "<|im_end|>": STOP}.get(marker, ord(marker[0])))
            text = text[len(marker) :]
        return ids


def conversation(max_prompt_tokens=400):
    return Conversation(Letters(), max_prompt_tokens, system="s")


def written(*turns):
    """The tokens of the chat format, written from scratch: turns of (role, text), and the beginning of a reply."""
    text = "".join(f"<|im_start|>{role}\n{said}<|im_end|>\n" for role, said in turns)
    return tuple(Letters().encode(text + "<|im_start|>assistant\n"))


@pytest.mark.parametrize("reply", [[*b"yes", STOP], [*b"yes"]], ids=["complete", "cut off"])
def test_a_later_prompt_is_the_whole_conversation_and_begins_with_the_earlier_one(reply):
    talk = conversation()
    first = talk.prompt("a?")
    assert first == written(("system", "s"), ("user", "a?"))
    talk.add("a?", reply)
    second = talk.prompt("b?")
    assert second == written(("system", "s"), ("user", "a?"), ("assistant", "yes"), ("user", "b?"))
    assert second[: len(first) + len(reply)] == (*first, *reply)


def test_the_oldest_exchanges_are_left_out_when_there_is_no_room():
    talk = conversation(max_prompt_tokens=len(written(("system", "s"), ("user", "a?"), ("assistant", "yes"), ("user", "b?"))))
    for message in ("a?", "b?"):
        talk.add(message, [*b"yes", STOP])
    assert talk.prompt("c?") == written(("system", "s"), ("user", "b?"), ("assistant", "yes"), ("user", "c?"))
    assert talk.dropped == 1


def test_a_message_without_room_is_refused():
    with pytest.raises(ValueError, match=r"message has \d+ tokens: it must have at most"):
        conversation(max_prompt_tokens=20).prompt("a long message")


def test_prompts_are_the_lines_of_a_file(tmp_path, monkeypatch):
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\n  two \n")
    assert command.read_prompts(str(file)) == ["one", "two"]
    monkeypatch.setattr("sys.stdin", io.StringIO("three\n"))
    assert command.read_prompts("-") == ["three"]


@pytest.mark.parametrize("text", [None, "\n \n"], ids=["missing", "empty"])
def test_a_file_without_prompts_is_refused(tmp_path, text):
    file = tmp_path / "prompts.txt"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match="--prompt-file is"):
        command.read_prompts(str(file))


@pytest.mark.parametrize("options", [["--chat", "Hello"], ["--chat", "--prompt-file", "x"], ["--prompt-file", "/nowhere"]])
def test_options_that_do_not_fit_end_with_a_sentence(options):
    with pytest.raises(SystemExit, match="these options don't fit together: --"):
        command.main(options)


def planned():
    """Two sequences of one common block, after their first step."""
    pool = BlockPool(6, 4)
    scheduler = Scheduler(pool, max_seqs=2, max_tokens=16, max_seq_len=16)
    sequences = [Sequence((1, 2, 3, 4, 5), 4), Sequence((1, 2, 3, 4, 6), 4)]
    for sequence in sequences:
        scheduler.add(sequence)
    scheduler.advance(scheduler.plan(), [7, 8])
    return SimpleNamespace(schedulers=[scheduler]), sequences


def test_the_picture_shows_owned_shared_kept_and_free_blocks():
    engine, sequences = planned()
    assert cache_lines(engine, sequences)[0] == "#ab..."
    pool = engine.schedulers[0].pool
    pool.release(sequences[1].blocks)
    sequences[1].blocks = []
    assert cache_lines(engine, sequences)[0] == "aa...."
    pool.release(sequences[0].blocks)
    sequences[0].blocks = []
    assert cache_lines(engine, sequences) == [
        "+.....",
        "0 of 6 blocks used, 2 sequences run, 0 wait",
        "4 tokens found in shared blocks, 0 preempted",
    ]


def test_every_device_of_a_data_axis_has_its_own_picture():
    (engine, sequences), (other, more) = planned(), planned()
    both = SimpleNamespace(schedulers=[*engine.schedulers, *other.schedulers])
    assert cache_lines(both, [*sequences, *more])[::3] == ["#ab...", "#cd..."]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_on_a_terminal_the_picture_is_drawn_in_place():
    output = Terminal()
    cache_map = CacheMap(*planned(), output)
    cache_map.draw()
    lines = output.getvalue().count("\n")
    cache_map.draw()
    assert output.getvalue().count(f"\033[{lines}F\033[J") == 1
    cache_map.clear()
    assert output.getvalue().endswith(f"\033[{lines}F\033[J")


def test_elsewhere_the_picture_is_printed_now_and_then():
    output = io.StringIO()
    cache_map = CacheMap(*planned(), output)
    for _ in range(PRINT_EVERY + 1):
        cache_map.clear()
        cache_map.draw()
    assert "\033" not in output.getvalue()
    assert [line for line in output.getvalue().splitlines() if line.startswith("step")] == ["step 1", f"step {PRINT_EVERY + 1}"]


@pytest.mark.slow
def test_a_chat_replies_and_finds_the_conversation_in_the_cache(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("Name a colour.\n\nAnother one?\n/exit\nnever read\n"))
    command.main(["--chat", "--stats", "--max-tokens=6", "--max-seq-len=96", "--chunk=48"])
    out = capsys.readouterr().out
    turns = [line for line in out.splitlines() if line.startswith("[") and "found in the cache" in line]
    # The second reply ends by itself before its sixth token.
    assert len(turns) == 2 and " 0 found in the cache, 6 generated" in turns[0] and " 32 found in the cache, " in turns[1]
    assert "step 1\n" in out and "never read" not in out
