"""Settings of ezmsg-sigproc's own class for the transformers and units of this package.

Those have the same fields, so whoever changes from ezmsg-sigproc to this package may go on building them, or classes
derived from them. They are built anew as settings of this package, which checks them. Without that, ezmsg would take a
settings object of another class for the value of the first field.
"""

import dataclasses
from collections.abc import Callable

import ezmsg.core as ez
from ezmsg.baseproc import suppress_axis_deprecation


def own_settings(kind: type[ez.Settings], given: ez.Settings) -> ez.Settings:
    """*given* as settings of class *kind*: itself if it is one, else one with the same values.

    Args:
        kind: A class of settings that extends one of ezmsg-sigproc.
        given: Settings of that class of ezmsg-sigproc or of one derived from it, whose further fields are left out, as
            there; or settings with exactly the fields of *kind*.

    Raises:
        TypeError: *given* is none of these.
        As *kind*, if it does not allow a value.
    """
    if isinstance(given, kind):
        return given
    names = {field.name for field in dataclasses.fields(kind)}
    extended = next((base for base in kind.__mro__ if base.__module__.startswith("ezmsg.sigproc.")), kind)
    if not isinstance(given, extended) and (
        not isinstance(given, ez.Settings) or {field.name for field in dataclasses.fields(given)} != names
    ):
        raise TypeError(f"settings is {given!r}; allowed is {kind.__module__}.{kind.__name__}.")
    # Warned about when *given* was built.
    with suppress_axis_deprecation():
        return kind(**{name: getattr(given, name) for name in names if hasattr(given, name)})


class _TakesSettings:
    _settings_class: Callable[[], type[ez.Settings]]

    def __init__(self, *args: object, settings: ez.Settings | None = None, **kwargs: object) -> None:
        if settings is None and args and isinstance(args[0], ez.Settings):
            settings, *args = args
        if settings is not None:
            settings = own_settings(self._settings_class(), settings)
        super().__init__(*args, settings=settings, **kwargs)


class TransformerTakesSettings(_TakesSettings):
    """A transformer that takes ezmsg-sigproc's settings for its own; to be named first among the bases."""

    @classmethod
    def _settings_class(cls) -> type[ez.Settings]:
        return cls.get_settings_type()

    def update_settings(self, new_settings: ez.Settings | None = None, **kwargs: object) -> None:
        if new_settings is not None:
            new_settings = own_settings(self._settings_class(), new_settings)
        super().update_settings(new_settings, **kwargs)


class UnitTakesSettings(_TakesSettings):
    """A unit that takes ezmsg-sigproc's settings for its own; to be named first among the bases."""

    SETTINGS: type[ez.Settings]

    @classmethod
    def _settings_class(cls) -> type[ez.Settings]:
        return cls.SETTINGS

    def apply_settings(self, settings: ez.Settings) -> None:
        super().apply_settings(own_settings(self._settings_class(), settings))
