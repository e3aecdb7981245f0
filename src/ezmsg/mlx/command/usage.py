"""Exit statuses, and errors that end the command with one sentence."""

DONE = 0
SOME_FAILED = 1
USAGE = 2
INTERRUPTED = 130
BROKEN_PIPE = 141
"""What a shell makes of a program that SIGPIPE has ended."""


class UsageError(Exception):
    """What an option asks for cannot be had.

    Args:
        option: The option, as it is written.
        text: What is wrong.
    """

    def __init__(self, option: str, text: str) -> None:
        super().__init__(text)
        self.option = option
