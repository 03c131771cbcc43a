"""The sections of a program's settings, and the role of every setting; needs neither torch nor MPI.

A section is a frozen dataclass of `setting`s beside the code that they are for. The name of a setting in its section is
also its name on the command line and in files, so that no two sections have one in common.
"""

import dataclasses
import functools
import typing
from collections.abc import Mapping

from fedmpi.ground.settings import Section

# The groups of settings beside the sections, each a choice of one class -> the role of its settings.
GROUPS = {
    "algorithm": "learning",
    "task": "problem",
    "oracle": "learning",
    "model": "problem",
    "partition": "problem",
    "aggregation": "learning",
    "codec": "learning",
    "stages": "learning",
}
Own = typing.TypeVar("Own", bound="Sections")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sections:
    """What has sections: a subclass declares them as fields, like ``folder: FolderSettings``."""

    @classmethod
    @functools.cache
    def classes(cls) -> dict[str, type[Section]]:
        """Section -> its class."""
        hints = typing.get_type_hints(cls).items()
        return {name: hint for name, hint in hints if isinstance(hint, type) and issubclass(hint, Section)}

    @classmethod
    def declared(cls) -> dict[str, "dataclasses.Field[typing.Any]"]:
        """Setting -> its field, of all sections."""
        return {field.name: field for section in cls.classes().values() for field in dataclasses.fields(section)}

    @classmethod
    def marked(cls, mark: str) -> set[str]:
        """The settings that `fedmpi.ground.settings.setting` has given a mark, like "each_start"."""
        return {name for name, field in cls.declared().items() if field.metadata.get(mark)}

    @classmethod
    @functools.cache
    def roles(cls) -> dict[str, str]:
        """Name -> role of every setting and of every group (see `fedmpi.ground.settings.ROLES`)."""
        return {**{name: field.metadata["role"] for name, field in cls.declared().items()}, **GROUPS}

    @classmethod
    def role(cls, key: str) -> str:
        """The role of a setting: "threads" has "speed", "task.data" has its group's; an unknown one has "learning"."""
        return cls.roles().get(key.partition(".")[0], "learning")

    @classmethod
    def filled(cls, values: Mapping[str, typing.Any]) -> dict[str, Section]:
        """Section -> itself, of the values of settings; the others have their defaults.

        Raises:
            UserError: one line, if one is not allowed.
        """
        return {
            name: section(**{f.name: values[f.name] for f in dataclasses.fields(section) if f.name in values})
            for name, section in cls.classes().items()
        }

    def flat(self) -> dict[str, typing.Any]:
        """Setting -> value, of all sections."""
        return {name: value for section in self.classes() for name, value in vars(getattr(self, section)).items()}

    def replaced(self: Own, values: Mapping[str, typing.Any], **others: typing.Any) -> Own:
        """A copy with other values of some settings, and of some fields that are no sections."""
        return dataclasses.replace(self, **self.filled({**self.flat(), **values}), **others)
