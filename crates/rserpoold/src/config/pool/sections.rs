//! The pool daemon's file as written: every key is optional.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use holdfast_daemon::config::{ConfigError, ConfigFile, LogConfigSection, TlsConfigSection};
use holdfast_proto::pool_element::LifeUnit;
use holdfast_proto::registrar::AddressPrefix;
use serde::Deserialize;
use toml::Spanned;

use super::{PoolConfig, RegistrarAddress, UdpEncapsulation};
use crate::config::life_unit::LifeUnitKey;
use crate::config::optional_keys::set_if_present;
use crate::config::sctp_section::SctpConfigSection;

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
pub(super) struct PoolFile {
    pool: PoolConfigSection,
    access: AccessConfigSection,
    multicast: MulticastConfigSection,
    sctp: SctpConfigSection,
    tls: Option<TlsConfigSection>,
    log: LogConfigSection,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct PoolConfigSection {
    listen: Option<Vec<IpAddr>>,
    port: Option<u16>,
    raw: Option<bool>,
    encapsulation: Option<bool>,
    encapsulation_port: Option<u16>,
    remote_encapsulation_port: Option<std::num::NonZeroU16>,
    run_dir: Option<PathBuf>,
    registrars: Vec<Spanned<String>>,
    life_unit: Option<LifeUnitKey>,
    life_ms: Option<u64>,
    update_interval_ms: Option<u64>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct AccessConfigSection {
    registrar: Vec<Spanned<String>>,
    probe: Option<Vec<Spanned<String>>>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct MulticastConfigSection {
    announces: bool,
    group: Option<SocketAddr>,
    interfaces: Vec<String>,
}

impl PoolFile {
    pub(super) fn into_config(self, file: &ConfigFile<'_>) -> Result<PoolConfig, ConfigError> {
        let mut config = PoolConfig::default();
        let registrar = |written: &Spanned<String>| {
            written
                .get_ref()
                .parse::<RegistrarAddress>()
                .map_err(|error| {
                    let advice = "the default port is 3863, or 3864 with TLS";
                    file.error_for(written, error.to_string(), advice)
                })
        };
        let prefix = |written: &Spanned<String>| {
            written.get_ref().parse::<AddressPrefix>().map_err(|error| {
                let advice = "write ADDRESS or ADDRESS/LENGTH";
                file.error_for(written, error.to_string(), advice)
            })
        };
        config.registrars = self
            .pool
            .registrars
            .iter()
            .map(registrar)
            .collect::<Result<_, _>>()?;
        config.allowed_registrars = self
            .access
            .registrar
            .iter()
            .map(prefix)
            .collect::<Result<_, _>>()?;
        if let Some(probe) = &self.access.probe {
            config.allowed_probers = probe.iter().map(prefix).collect::<Result<_, _>>()?;
        }
        self.pool.apply(&mut config);
        self.sctp.apply(&mut config.failure, &mut config.path_mtu);
        config.tls = self.tls.map(|tls| tls.resolve_paths(file.path()));
        config.announces.trusted = self.multicast.announces;
        set_if_present(&mut config.announces.group, self.multicast.group);
        config.announces.interfaces = self.multicast.interfaces;
        config.log = self.log.into_config();
        Ok(config)
    }
}

impl PoolConfigSection {
    fn apply(self, config: &mut PoolConfig) {
        set_if_present(&mut config.listen, self.listen);
        set_if_present(&mut config.port, self.port);
        set_if_present(&mut config.raw, self.raw);
        let port = self.encapsulation_port.map(UdpEncapsulation::Port);
        set_if_present(&mut config.encapsulation, port);
        if self.encapsulation == Some(false) {
            config.encapsulation = UdpEncapsulation::Off;
        }
        config.remote_encapsulation = self.remote_encapsulation_port.map(Into::into);
        set_if_present(&mut config.run_dir, self.run_dir);
        let unit = self.life_unit.map(LifeUnit::from);
        set_if_present(&mut config.life_unit, unit);
        set_if_present(&mut config.life, self.life_ms.map(Duration::from_millis));
        let interval = self.update_interval_ms.map(Duration::from_millis);
        set_if_present(&mut config.update_interval, interval);
    }
}
