"""Plug-ins that are one file each, configured by spec strings such as ``"snapkv:kernel=7"``.

A plug-in is a class with a `name` and annotated defaults; `Registry.add` makes it a frozen dataclass. Dropping a
file into an axis folder is the whole change: `Registry.names` and `Registry.build` import every module of it.
"""

import dataclasses
import importlib
import pkgutil
import typing


def _parse_bool(text: str) -> bool:
    """`bool("0")` is True, so booleans have a parser of their own."""
    values = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if text.lower() not in values:
        raise ValueError(f"expected one of {', '.join(values)}, got {text!r}")
    return values[text.lower()]


class Registry:
    """The plug-ins of one axis.

    kind      what a plug-in is called in messages ("scorer", "layout", "format")
    package   dotted name of the folder whose modules register themselves when imported
    """

    def __init__(self, kind: str, package: str):
        self.kind = kind
        self.package = package
        self._items: dict[str, type] = {}
        self._loaded = False

    def add(self, cls: type) -> type:
        """Class decorator: make `cls` a frozen dataclass and register it under `cls.name`."""
        name = cls.name  # type: ignore[attr-defined]
        if name in self._items:
            raise ValueError(f"duplicate {self.kind} {name!r}")
        self._items[name] = dataclasses.dataclass(frozen=True)(cls)
        return self._items[name]

    def _load(self) -> None:
        if not self._loaded:
            self._loaded = True
            folder = importlib.import_module(self.package)
            for module in pkgutil.iter_modules(folder.__path__):
                importlib.import_module(f"{self.package}.{module.name}")

    def names(self) -> list[str]:
        """All registered names, sorted."""
        self._load()
        return sorted(self._items)

    def get(self, name: str) -> type:
        """The class registered as `name`; an unknown name is answered with the known ones."""
        self._load()
        if name not in self._items:
            raise ValueError(f"unknown {self.kind} {name!r}; known: {', '.join(self.names())}")
        return self._items[name]

    def options(self, name: str) -> dict[str, object]:
        """Option names of a plug-in with their defaults."""
        return {f.name: f.default for f in dataclasses.fields(self.get(name))}

    def build(self, spec: str) -> typing.Any:
        """Build a plug-in from ``name`` or ``name:key=value,key=value``; an unknown key is answered with the known."""
        name, _, text = spec.partition(":")
        cls = self.get(name)
        types = typing.get_type_hints(cls)
        fields = {f.name: types[f.name] for f in dataclasses.fields(cls)}
        kwargs: dict[str, object] = {}
        for item in filter(None, text.split(",")):
            key, equals, value = item.partition("=")
            if key not in fields:
                known = ", ".join(fields) or "none"
                raise ValueError(f"{self.kind} {name!r}: unknown option {key!r}; known: {known}")
            if not equals:
                raise ValueError(f"{self.kind} {name!r}: option {key!r} needs a value, as in {key}=VALUE")
            parse = _parse_bool if fields[key] is bool else fields[key]
            try:
                kwargs[key] = parse(value)
            except ValueError as error:
                raise ValueError(f"{self.kind} {name!r}: option {key!r}: {error}") from None
        return cls(**kwargs)
