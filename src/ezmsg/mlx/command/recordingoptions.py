"""Options that say how a recording is read, the same for each command."""

import argparse
import ast
import typing

Asked: typing.TypeAlias = dict[str, typing.Any]
"""What was given of them, as keyword arguments of :func:`ezmsg.mlx.offline.open_recording`."""


class _Argument(argparse.Action):
    """``NAME=VALUE`` into a dictionary, with the value as Python reads it, or else as text."""

    def __call__(
        self, parser: argparse.ArgumentParser, options: argparse.Namespace, text: object, option: str | None = None
    ) -> None:
        name, equals, value = str(text).partition("=")
        if not equals or not name.isidentifier():
            parser.error(f"argument {option}: it is {text!r}; allowed is NAME=VALUE")
        known = getattr(options, self.dest) or {}
        setattr(options, self.dest, {**known, name.replace("-", "_"): _value(value)})


def _value(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def add(parser: argparse.ArgumentParser, *, of_streams: bool = True) -> None:
    """Add them to *parser*; *of_streams*: those that choose a part of a recording, too."""
    group = parser.add_argument_group("how recordings are read")
    text = "of the recordings, for example spikeglx or nwb [told by the names of files]"
    group.add_argument("--format", metavar="NAME", help=text)
    if of_streams:
        group.add_argument("--stream", metavar="NAME", help="which signal of a recording [the only one]")
        text = "which segment, from 0, or all of them one after the other [the only one]"
        group.add_argument("--segment", type=_segment, metavar="N|all", help=text)
    text = "an argument of the source, for example sampling_rate=30000 and n_channels=384 of raw binary"
    group.add_argument("--source", action=_Argument, metavar="NAME=VALUE", help=text)


def _segment(text: str) -> int | str:
    if text != "all" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f'it is {text!r}; allowed are an integer >= 0 and "all"')
    return text if text == "all" else int(text)


def asked(options: argparse.Namespace) -> Asked:
    """What was given."""
    found = {name: getattr(options, name, None) for name in ("format", "stream", "segment")}
    return {**{name: value for name, value in found.items() if value is not None}, **(options.source or {})}
