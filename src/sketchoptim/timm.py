"""The optimizers in timm's registry: importing this module registers them.

>>> import sketchoptim.timm  # doctest: +SKIP
>>> timm.optim.create_optimizer_v2(model, "so-adamw", lr=1e-3)  # doctest: +SKIP
"""

from timm.optim import OptimInfo
from timm.optim._optim_factory import default_registry

from .optim import OPTIMIZERS

__all__: list[str] = []

# timm hands over groups without names, so shapes decide what is a table.
for _name, _kind in OPTIMIZERS.items():
    default_registry.register(
        OptimInfo(
            name=f"so-{_name.lower()}",
            opt_class=_kind,
            description=f"sketchoptim's {_name}: the state of tables is compressed",
            has_eps=_name != "SGD",
            has_betas=_name.startswith("Adam"),
            has_momentum=_name == "SGD",
            defaults={"compress": "tables"},
        )
    )
