//! The registrar's file as written: every key is optional.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use holdfast_daemon::config::{
    ConfigError, ConfigFile, LogConfigSection, MetricsConfigSection, TlsConfigSection,
};
use holdfast_proto::registrar::{
    HostClass, LifeUnit, PermittedHosts, RegistrarSettings, ResourceLimits, TakeoverRaceWinner,
};
use holdfast_wire::rserpool::enrp;
use serde::Deserialize;
use toml::Spanned;

use super::asap_tcp::TcpConfigSection;
use super::{RegistrarConfig, RegistrarPeer};
use crate::config::life_unit::LifeUnitKey;
use crate::config::optional_keys::{set_if_present, set_ms};
use crate::config::sctp_section::SctpConfigSection;

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RegistrarFile {
    registrar: RegistrarConfigSection,
    peer: Vec<PeerConfigSection>,
    access: AccessConfigSection,
    limits: LimitsConfigSection,
    sctp: SctpConfigSection,
    tcp: TcpConfigSection,
    tls: Option<TlsConfigSection>,
    multicast: MulticastConfigSection,
    metrics: MetricsConfigSection,
    log: LogConfigSection,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct RegistrarConfigSection {
    id: Option<std::num::NonZeroU32>,
    listen: Option<Vec<IpAddr>>,
    asap_port: Option<u16>,
    enrp_port: Option<u16>,
    raw: Option<bool>,
    encapsulation: Option<bool>,
    encapsulation_port: Option<u16>,
    remote_encapsulation_port: Option<std::num::NonZeroU16>,
    send_to_all_at_once: Option<bool>,
    batch_delay_us: Option<u32>,
    update_delay_ms: Option<u64>,
    run_dir: Option<PathBuf>,
    life_unit: Option<LifeUnitKey>,
    resolution_items: Option<usize>,
    resolution_items_max: Option<usize>,
    keep_alive_interval_ms: Option<u64>,
    keep_alive_timeout_ms: Option<u64>,
    keep_alive_names_element: Option<bool>,
    bad_reports_max: Option<usize>,
    report_interval_ms: Option<u64>,
    addresses_checked: Option<bool>,
    distance_step_ms: Option<u32>,
    heartbeat_cycle_ms: Option<u64>,
    last_heard_max_ms: Option<u64>,
    no_response_max_ms: Option<u64>,
    retry_ms: Option<u64>,
    takeover_race: Option<TakeoverRaceKey>,
    race_window_ms: Option<u64>,
    refresh_delay_ms: Option<u64>,
    table_bytes_max: Option<usize>,
    table_elements_max: Option<usize>,
    downloads_max: Option<usize>,
}

#[derive(Deserialize, Clone, Copy)]
#[serde(rename_all = "snake_case")]
enum TakeoverRaceKey {
    LowerId,
    HigherId,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PeerConfigSection {
    addresses: Vec<IpAddr>,
    port: Option<u16>,
    encapsulation_port: Option<std::num::NonZeroU16>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct AccessConfigSection {
    register: Option<Vec<Spanned<String>>>,
    resolve: Option<Vec<Spanned<String>>>,
    registrar: Option<Vec<Spanned<String>>>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct LimitsConfigSection {
    ipv6_host_bits: Option<u8>,
    associations_per_host: Option<usize>,
    elements_per_host: Option<usize>,
    pools_per_host: Option<usize>,
    messages_per_second: Option<u32>,
    first_message_ms: Option<u64>,
    confirmation_ms: Option<u64>,
    associations: Option<usize>,
    malformed: Option<u32>,
    pools: Option<usize>,
    elements: Option<usize>,
    registration_bytes: Option<usize>,
    registrars: Option<usize>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct MulticastConfigSection {
    asap_group: Option<SocketAddr>,
    enrp_group: Option<SocketAddr>,
    interfaces: Vec<String>,
    announce_ms: Option<std::num::NonZeroU64>,
    enrp: bool,
    mentor_hunt_ms: Option<u64>,
}

impl RegistrarFile {
    pub(super) fn into_config(self, file: &ConfigFile<'_>) -> Result<RegistrarConfig, ConfigError> {
        let mut config = RegistrarConfig::default();
        self.registrar.apply_settings(&mut config.settings);
        self.registrar.apply_endpoints(&mut config);
        self.limits.apply(&mut config.settings.limits);
        self.sctp.apply(&mut config.failure, &mut config.path_mtu);
        self.tcp.apply(self.tls, file.path(), &mut config.streams);
        let access = &mut config.settings.access;
        let access_lists = [
            (&mut access.register, self.access.register),
            (&mut access.resolve, self.access.resolve),
            (&mut access.registrar, self.access.registrar),
        ];
        for (target, given) in access_lists {
            set_if_present(
                target,
                given
                    .map(|list| parse_access_list(file, list))
                    .transpose()?,
            );
        }
        config.peers = self
            .peer
            .into_iter()
            .map(PeerConfigSection::into_peer)
            .collect();
        let multicast = self.multicast;
        set_if_present(&mut config.multicast.asap_group, multicast.asap_group);
        set_if_present(&mut config.multicast.enrp_group, multicast.enrp_group);
        config.multicast.interfaces = multicast.interfaces;
        config.settings.enrp_multicast = multicast.enrp;
        let cycle = multicast
            .announce_ms
            .map(|ms| Duration::from_millis(ms.get()));
        config.settings.announce_cycle = cycle;
        set_ms(
            &mut config.settings.mentor_hunt_time,
            multicast.mentor_hunt_ms,
        );
        config.metrics_listen = self.metrics.listen;
        config.log = self.log.into_config();
        Ok(config)
    }
}

fn parse_access_list(
    file: &ConfigFile<'_>,
    list: Vec<Spanned<String>>,
) -> Result<PermittedHosts, ConfigError> {
    let parse = |written: Spanned<String>| {
        written.get_ref().parse::<HostClass>().map_err(|error| {
            let advice = "write ADDRESS or ADDRESS/LENGTH";
            file.error_for(&written, error.to_string(), advice)
        })
    };
    let allowed: Result<_, _> = list.into_iter().map(parse).collect();
    Ok(PermittedHosts::Only(allowed?))
}

impl PeerConfigSection {
    fn into_peer(self) -> RegistrarPeer {
        let port = self.port.unwrap_or(enrp::PORT);
        let at = |address| SocketAddr::new(address, port);
        RegistrarPeer {
            addresses: self.addresses.into_iter().map(at).collect(),
            encapsulation: self.encapsulation_port.map(Into::into),
        }
    }
}

impl RegistrarConfigSection {
    fn apply_endpoints(self, config: &mut RegistrarConfig) {
        config.id = self.id.map(Into::into);
        set_if_present(&mut config.listen, self.listen);
        set_if_present(&mut config.asap_port, self.asap_port);
        set_if_present(&mut config.enrp_port, self.enrp_port);
        set_if_present(&mut config.raw, self.raw);
        if self.encapsulation_port.is_some() {
            config.encapsulation = self.encapsulation_port;
        }
        if self.encapsulation == Some(false) {
            config.encapsulation = None;
        }
        config.remote_encapsulation = self.remote_encapsulation_port.map(Into::into);
        set_if_present(&mut config.send_to_all_at_once, self.send_to_all_at_once);
        let batch_delay = self
            .batch_delay_us
            .map(|us| Duration::from_micros(us.into()));
        set_if_present(&mut config.batch_delay, batch_delay);
        set_ms(&mut config.update_delay, self.update_delay_ms);
        set_if_present(&mut config.run_dir, self.run_dir);
    }

    fn apply_settings(&self, settings: &mut RegistrarSettings) {
        let unit = self.life_unit.map(LifeUnit::from);
        set_if_present(&mut settings.life_unit, unit);
        let race = self.takeover_race.map(|race| match race {
            TakeoverRaceKey::LowerId => TakeoverRaceWinner::LowerId,
            TakeoverRaceKey::HigherId => TakeoverRaceWinner::HigherId,
        });
        set_if_present(&mut settings.takeover_race, race);
        set_if_present(&mut settings.resolution_items, self.resolution_items);
        let items_max = self.resolution_items_max;
        set_if_present(&mut settings.resolution_items_max, items_max);
        let interval = self.keep_alive_interval_ms;
        set_ms(&mut settings.keep_alive_interval, interval);
        let timeout = self.keep_alive_timeout_ms;
        set_ms(&mut settings.keep_alive_timeout, timeout);
        let names = self.keep_alive_names_element;
        set_if_present(&mut settings.keep_alive_names_element, names);
        set_if_present(&mut settings.bad_reports_max, self.bad_reports_max);
        set_ms(&mut settings.report_probe_interval, self.report_interval_ms);
        set_if_present(&mut settings.check_addresses, self.addresses_checked);
        set_if_present(&mut settings.distance_step, self.distance_step_ms);
        set_ms(&mut settings.heartbeat_cycle, self.heartbeat_cycle_ms);
        set_ms(&mut settings.last_heard_max, self.last_heard_max_ms);
        set_ms(&mut settings.no_response_max, self.no_response_max_ms);
        set_ms(&mut settings.retry_interval, self.retry_ms);
        set_ms(&mut settings.race_window, self.race_window_ms);
        set_ms(&mut settings.refresh_delay, self.refresh_delay_ms);
        set_if_present(&mut settings.table_bytes_max, self.table_bytes_max);
        set_if_present(&mut settings.table_elements_max, self.table_elements_max);
        set_if_present(&mut settings.downloads_max, self.downloads_max);
    }
}

impl LimitsConfigSection {
    fn apply(self, limits: &mut ResourceLimits) {
        set_if_present(
            &mut limits.associations_per_host,
            self.associations_per_host,
        );
        set_if_present(&mut limits.ipv6_host_bits, self.ipv6_host_bits);
        set_if_present(&mut limits.elements_per_host, self.elements_per_host);
        set_if_present(&mut limits.pools_per_host, self.pools_per_host);
        set_ms(&mut limits.first_message_timeout, self.first_message_ms);
        set_ms(&mut limits.confirmation_timeout, self.confirmation_ms);
        set_if_present(&mut limits.associations, self.associations);
        set_if_present(&mut limits.messages_per_second, self.messages_per_second);
        set_if_present(&mut limits.malformed_max, self.malformed);
        set_if_present(&mut limits.pools, self.pools);
        set_if_present(&mut limits.elements, self.elements);
        set_if_present(&mut limits.registration_bytes, self.registration_bytes);
        set_if_present(&mut limits.registrars, self.registrars);
    }
}
