"""Settings of ezmsg-sigproc's own class for the transformers and units of this package.

Those have the same fields, so whoever changes from ezmsg-sigproc to this package may go on building them. They are
built anew as settings of this package, which checks them. Without that, ezmsg would take a settings object of another
class for the value of the first field.
"""

import dataclasses
import typing
from collections.abc import Callable

import ezmsg.core as ez
from ezmsg.baseproc import suppress_axis_deprecation


def own_settings(kind: type[ez.Settings], given: ez.Settings) -> ez.Settings:
    """*given* as settings of class *kind*: itself if it is one, else one with the same values.

    Raises:
        TypeError: The fields of *given* are not those of *kind*.
        As *kind*, if it does not allow a value.
    """
    if isinstance(given, kind):
        return given
    names = [field.name for field in dataclasses.fields(kind)]
    if not isinstance(given, ez.Settings) or {field.name for field in dataclasses.fields(given)} != set(names):
        raise TypeError(f"settings is {given!r}; allowed is {kind.__module__}.{kind.__name__}.")
    # Warned about when *given* was built.
    with suppress_axis_deprecation():
        return kind(**{name: getattr(given, name) for name in names})


class _TakesSettings:
    _settings_class: Callable[[], type[ez.Settings]]

    def __init__(self, *args: object, settings: ez.Settings | None = None, **kwargs: object) -> None:
        if settings is None and args and isinstance(args[0], ez.Settings):
            settings, *args = args
        if settings is not None:
            settings = own_settings(self._settings_class(), settings)
        super().__init__(*args, settings=settings, **kwargs)


class TransformerTakesSettings(_TakesSettings):
    """To be named first among the bases of a transformer."""

    @classmethod
    def _settings_class(cls) -> type[ez.Settings]:
        return cls.get_settings_type()

    def update_settings(self, new_settings: ez.Settings | None = None, **kwargs: object) -> None:
        if new_settings is not None:
            new_settings = own_settings(self._settings_class(), new_settings)
        super().update_settings(new_settings, **kwargs)


class UnitTakesSettings(_TakesSettings):
    """To be named first among the bases of a unit."""

    SETTINGS: typing.ClassVar[type[ez.Settings]]

    @classmethod
    def _settings_class(cls) -> type[ez.Settings]:
        return cls.SETTINGS

    def apply_settings(self, settings: ez.Settings) -> None:
        super().apply_settings(own_settings(self._settings_class(), settings))
