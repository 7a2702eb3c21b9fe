//! The configuration of a registrar: a TOML file in which every key may be absent, as may the file.

pub(super) mod raw;
mod streams;
#[cfg(test)]
mod tests;

pub use streams::StreamsConfig;

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use holdfast_proto::registrar::Settings;
use holdfast_sys::transport::{ENCAPSULATION_PORT, Failure};
use holdfast_wire::rserpool::{asap, enrp};

use super::{ConfigError, IF_NONE_IS_NEEDED, LogConfig, LogFormat, read};

/// Where rsplib announces to elements, and registrars to each other.
pub(super) const ASAP_GROUP: SocketAddr =
    SocketAddr::new(IpAddr::V4(Ipv4Addr::new(239, 0, 0, 50)), 3863);
const ENRP_GROUP: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(239, 0, 0, 51)), 9901);

/// What an SCTP packet inside UDP may measure on an ordinary network.
pub(super) const PATH_MTU: u32 = 1400;
/// What a path that carries IPv4 or IPv6 must at least allow, and what the stacks take at most.
pub(super) const PATH_MTU_RANGE: std::ops::RangeInclusive<u32> = 576..=65_535;

/// A request that comes alone is answered at once; thousands a second are so much later, at a fraction of the cost.
const PAUSE: Duration = Duration::from_millis(2);

/// Some milliseconds hold dozens of updates where elements register by the thousand.
const UPDATE_DELAY: Duration = Duration::from_millis(20);

/// A checked configuration of a registrar.
#[derive(Debug, Clone)]
pub struct RegistrarConfig {
    /// The file that it was read from.
    pub file: Option<PathBuf>,
    /// Its number; none: a random one at each start.
    pub id: Option<u32>,
    /// Its addresses, all of one family; an unspecified one stands for all of the host.
    pub listen: Vec<IpAddr>,
    /// SCTP port of elements and users; 0 lets the system choose.
    pub asap_port: u16,
    /// SCTP port of other registrars; 0 lets the system choose.
    pub enrp_port: u16,
    /// Whether SCTP goes over IP itself, where the process may.
    pub raw: bool,
    /// The local UDP port of SCTP inside UDP (RFC 6951), 0 letting the system choose; none: no such packets.
    pub encapsulation: Option<u16>,
    /// The UDP port to reach others at whose own is not known; none: none if SCTP goes over IP itself, else 9899.
    pub remote_encapsulation: Option<u16>,
    /// When SCTP gives up a path, an association or an attempt.
    pub failure: Failure,
    /// Largest SCTP packet with its IP header, bytes.
    pub path_mtu: u32,
    /// Whether a message to all peers is handed to the transport once, rather than once for each.
    pub one_send: bool,
    /// How long requests are let come, where little time is between them, to be handled together; zero: not at all.
    pub pause: Duration,
    /// How long an update may wait for others, to share packets with them.
    pub update_delay: Duration,
    /// Sockets; emptied by a reboot.
    pub run_dir: PathBuf,
    /// Registrars to begin with.
    pub peers: Vec<RegistrarPeer>,
    /// ASAP over TCP and TLS.
    pub streams: StreamsConfig,
    /// Announces.
    pub multicast: MulticastConfig,
    /// What the machine heeds.
    pub settings: Settings,
    /// Where metrics are served over TCP besides the control socket, if anywhere.
    pub metrics_listen: Option<SocketAddr>,
    /// Form and filter of the log.
    pub log: LogConfig,
}

/// `[[peer]]`: another registrar.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegistrarPeer {
    /// All its addresses, with one port.
    pub addresses: Vec<SocketAddr>,
    /// The UDP port it is reached at, if it has one of its own.
    pub encapsulation: Option<u16>,
}

/// `[multicast]`: groups and interfaces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MulticastConfig {
    /// Where elements and users hear of registrars. Joined if announces are sent.
    pub asap_group: SocketAddr,
    /// Where registrars hear of each other. Joined if that is believed.
    pub enrp_group: SocketAddr,
    /// By name; none: as the routing table says.
    pub interfaces: Vec<String>,
}

impl RegistrarPeer {
    /// A registrar with one address, from `ADDRESS` or `ADDRESS:PORT`.
    ///
    /// # Errors
    /// The text is neither.
    pub fn parse(text: &str) -> Result<RegistrarPeer, std::net::AddrParseError> {
        let address = match text.parse::<IpAddr>() {
            Ok(address) => SocketAddr::new(address, enrp::PORT),
            Err(_) => text.parse()?,
        };
        Ok(RegistrarPeer {
            addresses: vec![address],
            encapsulation: None,
        })
    }
}

impl Default for RegistrarConfig {
    fn default() -> RegistrarConfig {
        RegistrarConfig {
            file: None,
            id: None,
            listen: vec![Ipv4Addr::UNSPECIFIED.into()],
            asap_port: asap::PORT,
            enrp_port: enrp::PORT,
            raw: true,
            encapsulation: Some(ENCAPSULATION_PORT),
            remote_encapsulation: None,
            failure: Failure::default(),
            path_mtu: PATH_MTU,
            one_send: true,
            pause: PAUSE,
            update_delay: UPDATE_DELAY,
            run_dir: PathBuf::from("/run/holdfast"),
            peers: Vec::new(),
            streams: StreamsConfig::default(),
            multicast: MulticastConfig {
                asap_group: ASAP_GROUP,
                enrp_group: ENRP_GROUP,
                interfaces: Vec::new(),
            },
            settings: Settings::default(),
            metrics_listen: None,
            log: LogConfig {
                format: LogFormat::default(),
                filter: "info".to_owned(),
            },
        }
    }
}

impl RegistrarConfig {
    /// Reads and checks the file at `path`; without one, the defaults.
    ///
    /// # Errors
    /// The file cannot be read, is not TOML, has an unknown key, or contradicts itself.
    pub fn load(path: Option<&Path>) -> Result<RegistrarConfig, ConfigError> {
        let Some(path) = path else {
            return Ok(RegistrarConfig::default());
        };
        let text = read(path, IF_NONE_IS_NEEDED)?;
        let mut config = RegistrarConfig::parse(path, &text)?;
        config.file = Some(path.to_owned());
        Ok(config)
    }

    /// Reads and checks its file anew; none if there is none. What only a start may change is as in the file, but the multicast
    /// settings are this configuration's: groups are joined at the start.
    ///
    /// # Errors
    /// As [`RegistrarConfig::load`].
    pub fn reread(&self) -> Result<Option<RegistrarConfig>, ConfigError> {
        let Some(path) = &self.file else {
            return Ok(None);
        };
        let mut fresh = RegistrarConfig::load(Some(path))?;
        let settings = &mut fresh.settings;
        settings.enrp_multicast = self.settings.enrp_multicast;
        if self.settings.announce_cycle.is_none() || settings.announce_cycle.is_none() {
            settings.announce_cycle = self.settings.announce_cycle;
        }
        Ok(Some(fresh))
    }

    /// Checks `text` as if it were the content of `path`.
    ///
    /// # Errors
    /// As [`RegistrarConfig::load`].
    pub fn parse(path: &Path, text: &str) -> Result<RegistrarConfig, ConfigError> {
        let raw: raw::Raw =
            toml::from_str(text).map_err(|error| ConfigError::from_toml(path, text, &error))?;
        let config = raw.checked(path, text)?;
        config.check(path)?;
        Ok(config)
    }

    /// The Unix socket of the control API.
    pub fn control_socket(&self) -> PathBuf {
        self.run_dir.join("registrar.sock")
    }

    /// The UDP ports of the peers that have one of their own.
    pub fn encapsulations(&self) -> HashMap<SocketAddr, u16> {
        let each = |peer: &RegistrarPeer| {
            let port = peer.encapsulation?;
            Some(peer.addresses.clone().into_iter().map(move |at| (at, port)))
        };
        self.peers.iter().filter_map(each).flatten().collect()
    }

    /// Whether it makes sense as a whole; `path` is what errors name.
    ///
    /// # Errors
    /// It contradicts itself.
    pub fn check(&self, path: &Path) -> Result<(), ConfigError> {
        let fail =
            |problem: &str, advice| Err(ConfigError::whole_file(path, problem.to_owned(), advice));
        let one_family = |mut addresses: std::slice::Iter<'_, IpAddr>| {
            let first = addresses.next().map(IpAddr::is_ipv4);
            first.is_some() && addresses.all(|address| Some(address.is_ipv4()) == first)
        };
        if !one_family(self.listen.iter()) {
            let advice = "name at least one address, all IPv4 or all IPv6";
            return fail("registrar.listen has none or mixed addresses", advice);
        }
        if !self.raw && self.encapsulation.is_none() {
            let advice = "leave one of raw and encapsulation on";
            return fail("SCTP neither over IP nor inside UDP", advice);
        }
        if self.peers.iter().any(|peer| peer.addresses.is_empty()) {
            return fail("a peer without addresses", "give it one or more");
        }
        let groups = [self.multicast.asap_group, self.multicast.enrp_group];
        if groups.iter().any(|group| !group.ip().is_multicast()) {
            let advice = "use one such as 239.0.0.50:3863";
            return fail("a group is no multicast address", advice);
        }
        if !PATH_MTU_RANGE.contains(&self.path_mtu) {
            return fail("sctp.path_mtu is out of range", "use 576 to 65535 bytes");
        }
        let limits = &self.settings.limits;
        if limits.ipv6_host_bits > 128 {
            let advice = "use 64, or 128 for every address by itself";
            return fail("limits.ipv6_host_bits is out of range", advice);
        }
        if limits.messages_per_second == 0 {
            let advice = "allow at least 1, or use [access] to keep everybody out";
            return fail("limits.messages_per_second is 0", advice);
        }
        self.streams.check(&self.settings.access, path)?;
        let rto = &self.failure;
        if rto.rto_min > rto.rto_max || !(rto.rto_min..=rto.rto_max).contains(&rto.rto_initial) {
            let advice = "make rto_min_ms the least and rto_max_ms the largest of the three";
            return fail("[sctp] has retransmission timeouts out of order", advice);
        }
        let (heartbeat, silent) = (self.settings.heartbeat_cycle, self.settings.last_heard_max);
        if heartbeat == Duration::ZERO || heartbeat >= silent {
            let advice = "make last_heard_max_ms at least twice heartbeat_cycle_ms";
            return fail("peers would be silent between two heartbeats", advice);
        }
        Ok(())
    }
}
