"""Times purepage beside what is installed: see README.md here."""
