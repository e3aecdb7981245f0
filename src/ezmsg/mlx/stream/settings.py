"""Settings of ezmsg-sigproc's own class for the transformers and units of this package.

Those have the same fields, so whoever changes from ezmsg-sigproc to this package may go on building them, or classes
derived from them. They are built anew as settings of this package, which checks them. Without that, ezmsg would take a
settings object of another class for the value of the first field.
"""

import dataclasses
from typing import TYPE_CHECKING, TypeVar, cast

import ezmsg.core as ez
from ezmsg.baseproc import suppress_axis_deprecation

SettingsT = TypeVar("SettingsT", bound=ez.Settings)

if TYPE_CHECKING:
    from ezmsg.baseproc import BaseProcessor
    from ezmsg.util.messages.axisarray import AxisArray

    class _Transformer:
        """What the mixin for transformers calls of the classes behind it."""

        def __init__(self, *args: object, settings: ez.Settings | None = None, **kwargs: object) -> None: ...
        def update_settings(self, new_settings: ez.Settings | None = None, **kwargs: object) -> None: ...

    _Unit = ez.Unit
else:
    _Transformer = _Unit = object


def own_settings(kind: type[SettingsT], given: ez.Settings) -> SettingsT:
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


def _taken(
    kind: type[ez.Settings], args: tuple[object, ...], settings: ez.Settings | None
) -> tuple[tuple[object, ...], ez.Settings | None]:
    if settings is None and args and isinstance(args[0], ez.Settings):
        settings, args = args[0], args[1:]
    return args, settings if settings is None else own_settings(kind, settings)


class TransformerTakesSettings(_Transformer):
    """A transformer that takes ezmsg-sigproc's settings for its own; to be named first among the bases."""

    def __init__(self, *args: object, settings: ez.Settings | None = None, **kwargs: object) -> None:
        args, settings = _taken(self._settings_class(), args, settings)
        super().__init__(*args, settings=settings, **kwargs)

    def _settings_class(self) -> type[ez.Settings]:
        return cast("BaseProcessor[ez.Settings, AxisArray, AxisArray]", self).get_settings_type()

    def update_settings(self, new_settings: ez.Settings | None = None, **kwargs: object) -> None:
        """Take other settings, of this package or of ezmsg-sigproc's class for them."""
        if new_settings is not None:
            new_settings = own_settings(self._settings_class(), new_settings)
        super().update_settings(new_settings, **kwargs)


class UnitTakesSettings(_Unit):
    """A unit that takes ezmsg-sigproc's settings for its own; to be named first among the bases."""

    # Component declares the None that an instance begins with, and no class of settings.
    SETTINGS: type[ez.Settings]  # type: ignore[assignment]

    def __init__(self, *args: object, settings: ez.Settings | None = None, **kwargs: object) -> None:
        args, settings = _taken(type(self).SETTINGS, args, settings)
        super().__init__(*args, settings=settings, **kwargs)

    def apply_settings(self, settings: ez.Settings) -> None:
        """Take other settings, of this package or of ezmsg-sigproc's class for them."""
        super().apply_settings(own_settings(type(self).SETTINGS, settings))
