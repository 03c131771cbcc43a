"""Whether a module may draw random numbers."""

from torch import nn

# Layers that draw no random numbers; a model of these alone needs no seed per gradient.
_NEVER_DRAW = {
    nn.Flatten, nn.Identity, nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d,
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool2d,
    nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus,
    nn.BatchNorm1d, nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm,
}  # fmt: skip
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def may_draw(module: nn.Module) -> bool:
    """Whether a pass through a module may draw random numbers: unless all its parts are known never to.

    Known are some of torch's layers, if neither they nor their parameters have hooks, and Sequentials of them.
    """
    if any(getattr(nn.modules.module, f"_global{kind}") for kind in _HOOKS):
        return True
    hooked = any(parameter._backward_hooks for parameter in module.parameters())
    return hooked or not all(map(_never_draws, module.modules()))


def _never_draws(part: nn.Module) -> bool:
    is_sequential = type(part).forward is nn.Sequential.forward and type(part).__call__ is nn.Module.__call__
    is_known = type(part) in _NEVER_DRAW or is_sequential
    return is_known and "forward" not in vars(part) and not any(getattr(part, kind) for kind in _HOOKS)
