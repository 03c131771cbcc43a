"""What algorithms ask of data."""

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch  # which takes long to load


class Oracle(Protocol):
    """What an algorithm may ask of a client's data, see `fedmpi.oracles.base.Oracle`; a sample stays closed to it."""

    def draw(self) -> Any: ...
    def draw_first(self) -> Any: ...
    def whole(self) -> Any: ...
    def gradient(self, z: "torch.Tensor", xi: Any) -> "torch.Tensor": ...
    def gradient_pair(
        self, z: "torch.Tensor", z_prev: "torch.Tensor", xi: Any
    ) -> "tuple[torch.Tensor, torch.Tensor]": ...
