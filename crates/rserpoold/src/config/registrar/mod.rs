//! Configuration of a registrar: a TOML file in which every key is optional. The file is optional too.

mod asap_tcp;
mod sections;
#[cfg(test)]
mod tests;

pub use asap_tcp::AsapTcpConfig;

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use holdfast_daemon::config::{ConfigError, ConfigFile, LogConfig};
use holdfast_proto::registrar::RegistrarSettings;
use holdfast_sctp::{ENCAPSULATION_PORT, FailureDetection};
use holdfast_wire::rserpool::{asap, enrp};

use super::read_optional_file;
use super::sctp_section::{PATH_MTU, PATH_MTU_RANGE};

/// Multicast groups of rsplib, for announces to elements and between registrars.
pub(super) const ASAP_GROUP: SocketAddr =
    SocketAddr::new(IpAddr::V4(Ipv4Addr::new(239, 0, 0, 50)), 3863);
const ENRP_GROUP: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(239, 0, 0, 51)), 9901);

/// Default pause. A single request is answered at once; with thousands of requests a second, this delay saves most of
/// their cost.
const BATCH_DELAY: Duration = Duration::from_millis(2);

/// Default update delay: where elements register by the thousand, a few milliseconds contain dozens of updates.
const UPDATE_DELAY: Duration = Duration::from_millis(20);

/// A checked configuration of a registrar.
#[derive(Debug, Clone)]
pub struct RegistrarConfig {
    /// File that the configuration was read from.
    pub file: Option<PathBuf>,
    /// Registrar id; `None`: a random one at each start.
    pub id: Option<u32>,
    /// Addresses of the registrar, all of one family; an unspecified one stands for all of the host.
    pub listen: Vec<IpAddr>,
    /// SCTP port for elements and users; 0 lets the system choose.
    pub asap_port: u16,
    /// SCTP port for other registrars; 0 lets the system choose.
    pub enrp_port: u16,
    /// True if SCTP runs directly over IP, provided that the process is allowed to.
    pub raw: bool,
    /// Local UDP port of SCTP inside UDP (RFC 6951); 0 lets the system choose; `None`: no SCTP inside UDP.
    pub encapsulation: Option<u16>,
    /// Default UDP port of remote ends; `None`: no UDP if SCTP runs directly over IP, else 9899.
    pub remote_encapsulation: Option<u16>,
    /// Limits after which SCTP gives up a path, an association or an attempt.
    pub failure: FailureDetection,
    /// Largest SCTP packet with its IP header, in bytes.
    pub path_mtu: u32,
    /// True if a message to all peers is passed to the transport once, instead of once for each peer.
    pub send_to_all_at_once: bool,
    /// Time for which frequent requests are collected and then handled together; zero: not at all.
    pub batch_delay: Duration,
    /// Maximum time for which an update waits for others, to share packets with them.
    pub update_delay: Duration,
    /// Directory for sockets; emptied by a reboot.
    pub run_dir: PathBuf,
    /// Registrars known at start.
    pub peers: Vec<RegistrarPeer>,
    /// ASAP over TCP and TLS.
    pub streams: AsapTcpConfig,
    /// Groups and interfaces for announces by multicast.
    pub multicast: MulticastConfig,
    /// Settings of the registrar machine.
    pub settings: RegistrarSettings,
    /// Address for metrics over TCP, besides the control socket, if any.
    pub metrics_listen: Option<SocketAddr>,
    /// Format and filter of the log.
    pub log: LogConfig,
}

/// `[[peer]]`: another registrar.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegistrarPeer {
    /// Addresses of the peer, with one port.
    pub addresses: Vec<SocketAddr>,
    /// UDP port of the peer, if it differs from the default.
    pub encapsulation: Option<u16>,
}

/// `[multicast]`: groups and interfaces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MulticastConfig {
    /// Group in which elements and users receive announces. Joined if announces are sent.
    pub asap_group: SocketAddr,
    /// Group in which registrars receive each other's announces. Joined if these are believed.
    pub enrp_group: SocketAddr,
    /// Names of the interfaces; empty: as the routing table says.
    pub interfaces: Vec<String>,
}

impl RegistrarPeer {
    /// Parses a registrar with one address, `ADDRESS` or `ADDRESS:PORT`.
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
            failure: FailureDetection::default(),
            path_mtu: PATH_MTU,
            send_to_all_at_once: true,
            batch_delay: BATCH_DELAY,
            update_delay: UPDATE_DELAY,
            run_dir: PathBuf::from("/run/holdfast"),
            peers: Vec::new(),
            streams: AsapTcpConfig::default(),
            multicast: MulticastConfig {
                asap_group: ASAP_GROUP,
                enrp_group: ENRP_GROUP,
                interfaces: Vec::new(),
            },
            settings: RegistrarSettings::default(),
            metrics_listen: None,
            log: LogConfig::default(),
        }
    }
}

impl RegistrarConfig {
    /// Reads and checks the file at `path`; without a path, returns the defaults.
    ///
    /// # Errors
    /// The file cannot be read, is not TOML, has an unknown key, or contradicts itself.
    pub fn load(path: Option<&Path>) -> Result<RegistrarConfig, ConfigError> {
        let Some(path) = path else {
            return Ok(RegistrarConfig::default());
        };
        let text = read_optional_file(path)?;
        let mut config = RegistrarConfig::parse(path, &text)?;
        config.file = Some(path.to_owned());
        Ok(config)
    }

    /// Reads and checks the file again; returns `None` if there is no file. Settings that only a start can apply are
    /// taken from the file, except the multicast settings, which stay as they are because groups are joined at the
    /// start.
    ///
    /// # Errors
    /// As [`RegistrarConfig::load`].
    pub fn reload(&self) -> Result<Option<RegistrarConfig>, ConfigError> {
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
        let file = ConfigFile::new(path, text);
        let config = file
            .parse::<sections::RegistrarFile>()?
            .into_config(&file)?;
        config.check(path)?;
        Ok(config)
    }

    /// Returns the path of the control API's Unix socket.
    pub fn control_socket(&self) -> PathBuf {
        self.run_dir.join("registrar.sock")
    }

    /// Returns the UDP ports of the peers that have their own.
    pub fn encapsulations(&self) -> HashMap<SocketAddr, u16> {
        let peer_address = |peer: &RegistrarPeer| {
            let port = peer.encapsulation?;
            Some(peer.addresses.clone().into_iter().map(move |at| (at, port)))
        };
        self.peers
            .iter()
            .filter_map(peer_address)
            .flatten()
            .collect()
    }

    /// Checks the configuration as a whole; errors name `path`.
    ///
    /// # Errors
    /// The configuration contradicts itself.
    pub fn check(&self, path: &Path) -> Result<(), ConfigError> {
        let fail =
            |problem: &str, advice| Err(ConfigError::for_file(path, problem.to_owned(), advice));
        let is_one_family = |mut addresses: std::slice::Iter<'_, IpAddr>| {
            let first = addresses.next().map(IpAddr::is_ipv4);
            first.is_some() && addresses.all(|address| Some(address.is_ipv4()) == first)
        };
        if !is_one_family(self.listen.iter()) {
            let advice = "name at least one address, all IPv4 or all IPv6";
            return fail(
                "registrar.listen has no addresses, or addresses of both families",
                advice,
            );
        }
        if !self.raw && self.encapsulation.is_none() {
            let advice = "enable raw or encapsulation";
            return fail("SCTP is enabled neither over IP nor inside UDP", advice);
        }
        if self.peers.iter().any(|peer| peer.addresses.is_empty()) {
            return fail("a peer has no addresses", "give it at least one");
        }
        let groups = [self.multicast.asap_group, self.multicast.enrp_group];
        if groups.iter().any(|group| !group.ip().is_multicast()) {
            let advice = "use a multicast address such as 239.0.0.50:3863";
            return fail(
                "asap_group or enrp_group is not a multicast address",
                advice,
            );
        }
        if !PATH_MTU_RANGE.contains(&self.path_mtu) {
            return fail("sctp.path_mtu is out of range", "use 576 to 65535 bytes");
        }
        let limits = &self.settings.limits;
        if limits.ipv6_host_bits > 128 {
            let advice = "use 64, or 128 to limit each address separately";
            return fail("limits.ipv6_host_bits is out of range", advice);
        }
        if limits.messages_per_second == 0 {
            let advice = "allow at least 1, or use [access] to refuse everybody";
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
            return fail(
                "heartbeat_cycle_ms is too long for last_heard_max_ms",
                advice,
            );
        }
        Ok(())
    }
}
