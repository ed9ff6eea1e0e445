"""What users can set of the connectors: which ones an engine has, and their options."""

from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias

from longshore.connectors.base import ECRole
from longshore.protocol.errors import ConfigError
from longshore.protocol.settings import Setting, Settings

VerifyKV: TypeAlias = Literal["always", "sampled", "never"]


@dataclass(frozen=True, kw_only=True)
class ConnectorSettings(Settings):
    """The connectors of an engine. Raises ConfigError for a setting that has no effect."""

    kv_connector: Annotated[
        str | None,
        Setting(
            "KV beyond the device",
            "Connector that stores KV outside the device, given by its installed name or as "
            "package.module:Class. Default: none.",
        ),
    ] = None
    kv_connector_config: Annotated[
        str,
        Setting(
            "KV beyond the device",
            "Settings of the connector, as a JSON object or the path of a .toml file.",
        ),
    ] = field(default="{}", repr=False)
    ec_connector: Annotated[
        str | None,
        Setting(
            "KV beyond the device",
            "Encoder connector of a speech model, which hands encoder outputs to other engines: "
            "nixl, mooncake, or package.module:Class. Default: none.",
        ),
    ] = None
    ec_connector_config: Annotated[
        str,
        Setting(
            "KV beyond the device",
            "Settings of the encoder connector, as a JSON object or the path of a .toml file.",
        ),
    ] = field(default="{}", repr=False)
    ec_role: Annotated[
        ECRole,
        Setting(
            "KV beyond the device",
            "Whether the engine offers its encoder outputs to others (ec_producer), loads those "
            "of others before it encodes (ec_consumer), or both (ec_both).",
        ),
    ] = "ec_both"
    verify_kv: Annotated[
        VerifyKV | None,
        Setting(
            "KV beyond the device",
            "How often the checksum of a block that is loaded from host memory is verified: of "
            "every block, of one in 16, or never. Blocks from disk are always verified. Sets the "
            "option of the same name of a connector that has it. Default: the connector's.",
        ),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kv_connector is None and self.kv_connector_config != "{}":
            raise ConfigError(
                "kv_connector_config is set, but kv_connector is not, so it has no effect. Set "
                "kv_connector, for example to offloading, or remove kv_connector_config."
            )
        if self.ec_connector is None and (self.ec_connector_config, self.ec_role) != (
            "{}",
            "ec_both",
        ):
            raise ConfigError(
                "ec_connector_config or ec_role is set, but ec_connector is not, so it has no "
                "effect. Set ec_connector, for example to nixl, or remove it."
            )
        if self.kv_connector is None and self.verify_kv is not None:
            raise ConfigError(
                "verify_kv is set, but kv_connector is not, so there is nothing to verify. Set "
                "kv_connector, or remove verify_kv."
            )
