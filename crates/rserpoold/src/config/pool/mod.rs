//! Configuration of a pool daemon: a TOML file in which every key is optional. The file is optional too.

mod registrar_address;
mod sections;
#[cfg(test)]
mod tests;

pub use registrar_address::{RegistrarAddress, RegistrarAddressError};

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use holdfast_daemon::config::{ConfigError, ConfigFile, LogConfig, TlsConfig};
use holdfast_proto::pool_element::{CookieKey, LifeUnit};
use holdfast_proto::registrar::AddressPrefix;
use holdfast_sctp::{FailureDetection, StreamProtocol};
use holdfast_wire::rserpool::asap;

use super::read_optional_file;
use super::registrar::ASAP_GROUP;
use super::sctp_section::{PATH_MTU, PATH_MTU_RANGE};

/// A checked configuration of a pool daemon.
#[derive(Debug, Clone)]
pub struct PoolConfig {
    /// Addresses of the daemon, all of one family; an unspecified one stands for all of the host.
    pub listen: Vec<IpAddr>,
    /// SCTP port for registrars and for pool users that probe; 0 lets the system choose.
    pub port: u16,
    /// True if SCTP runs directly over IP, provided that the process is allowed to.
    pub raw: bool,
    /// SCTP inside UDP (RFC 6951).
    pub encapsulation: UdpEncapsulation,
    /// UDP port of the remote ends; `None` means that port 9899 is tried besides IP.
    pub remote_encapsulation: Option<u16>,
    /// Limits after which SCTP gives up a path, an association or an attempt.
    pub failure: FailureDetection,
    /// Largest SCTP packet with its IP header, in bytes.
    pub path_mtu: u32,
    /// Directory for sockets; emptied by a reboot.
    pub run_dir: PathBuf,
    /// Known registrars. If empty and announces are not believed, the registrar of this host is used.
    pub registrars: Vec<RegistrarAddress>,
    /// Addresses that may act as a registrar of elements here, besides `registrars`.
    pub allowed_registrars: Vec<AddressPrefix>,
    /// Addresses that may probe elements here.
    pub allowed_probers: Vec<AddressPrefix>,
    /// Unit of a registration's life.
    pub life_unit: LifeUnit,
    /// Default life of a registration, for programs that set none.
    pub life: Duration,
    /// Minimum time between two registrations of an element that only update its policy information.
    pub update_interval: Duration,
    /// Certificates, for registrars over TLS.
    pub tls: Option<TlsConfig>,
    /// Announces by multicast.
    pub announces: AnnounceConfig,
    /// Format and filter of the log.
    pub log: LogConfig,
}

/// Local UDP port of SCTP inside UDP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UdpEncapsulation {
    /// No SCTP inside UDP.
    Off,
    /// Port 9899, or a port chosen by the system if another process uses 9899. Off if the kernel has SCTP.
    Standard,
    /// UDP port of SCTP inside UDP; 0 lets the system choose.
    Port(u16),
}

/// `[multicast]`: reception of registrars' announces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AnnounceConfig {
    /// True if announces are believed; any host on the segment can send one.
    pub trusted: bool,
    /// Multicast group.
    pub group: SocketAddr,
    /// Names of the interfaces; empty: as the routing table says.
    pub interfaces: Vec<String>,
}

impl Default for PoolConfig {
    fn default() -> PoolConfig {
        PoolConfig {
            listen: vec![Ipv4Addr::UNSPECIFIED.into()],
            port: 0,
            raw: true,
            encapsulation: UdpEncapsulation::Standard,
            remote_encapsulation: None,
            failure: FailureDetection::default(),
            path_mtu: PATH_MTU,
            run_dir: PathBuf::from("/run/holdfast"),
            registrars: Vec::new(),
            allowed_registrars: Vec::new(),
            allowed_probers: ["0.0.0.0/0", "::/0"]
                .iter()
                .filter_map(|all| all.parse().ok())
                .collect(),
            life_unit: LifeUnit::Milliseconds,
            life: Duration::from_secs(300),
            update_interval: Duration::from_millis(250),
            tls: None,
            announces: AnnounceConfig {
                trusted: false,
                group: ASAP_GROUP,
                interfaces: Vec::new(),
            },
            log: LogConfig::default(),
        }
    }
}

impl PoolConfig {
    /// Reads and checks the file at `path`; without a path, returns the defaults.
    ///
    /// # Errors
    /// The file cannot be read, is not TOML, has an unknown key, or contradicts itself.
    pub fn load(path: Option<&Path>) -> Result<PoolConfig, ConfigError> {
        let Some(path) = path else {
            return Ok(PoolConfig::default());
        };
        let text = read_optional_file(path)?;
        PoolConfig::parse(path, &text)
    }

    /// Checks `text` as if it were the content of `path`.
    ///
    /// # Errors
    /// As [`PoolConfig::load`].
    pub fn parse(path: &Path, text: &str) -> Result<PoolConfig, ConfigError> {
        let file = ConfigFile::new(path, text);
        let config = file.parse::<sections::PoolFile>()?.into_config(&file)?;
        config.check(path)?;
        Ok(config)
    }

    /// Returns the path of the control API's Unix socket.
    pub fn control_socket(&self) -> PathBuf {
        self.run_dir.join("pool.sock")
    }

    /// Returns the path of the Unix socket for programs of elements and users.
    pub fn program_socket(&self) -> PathBuf {
        self.run_dir.join("pool-app.sock")
    }

    /// Returns the registrars known at start: the one of this host if the configuration names none.
    pub fn known_registrars(&self) -> Vec<RegistrarAddress> {
        if !self.registrars.is_empty() || self.announces.trusted {
            return self.registrars.clone();
        }
        let local = match self.listen.first() {
            Some(IpAddr::V6(_)) => IpAddr::V6(std::net::Ipv6Addr::LOCALHOST),
            _ => IpAddr::V4(Ipv4Addr::LOCALHOST),
        };
        vec![RegistrarAddress {
            address: SocketAddr::new(local, asap::PORT),
            transport: None,
        }]
    }

    /// Returns true if a host with these addresses may be a registrar of elements here, over SCTP. If announces are
    /// believed, any host may, since any host can announce itself. A registrar known only over TLS may not, since over
    /// SCTP any host could use its address.
    pub fn admits_registrar(&self, addresses: &[SocketAddr]) -> bool {
        if self.announces.trusted {
            return true;
        }
        let registrars = self.known_registrars();
        let admitted = |address: &SocketAddr| {
            let ip = address.ip();
            let is_it =
                |known: &RegistrarAddress| known.transport.is_none() && known.address.ip() == ip;
            registrars.iter().any(is_it)
                || self
                    .allowed_registrars
                    .iter()
                    .any(|prefix| prefix.contains(ip))
        };
        addresses.iter().any(admitted)
    }

    /// Returns true if a host with one of these addresses may probe elements here.
    pub fn admits_prober(&self, addresses: &[SocketAddr]) -> bool {
        let admitted = |prefix: &AddressPrefix| addresses.iter().any(|at| prefix.contains(at.ip()));
        self.allowed_probers.iter().any(admitted)
    }

    /// Checks the configuration as a whole; errors name `path`.
    ///
    /// # Errors
    /// The configuration contradicts itself.
    pub fn check(&self, path: &Path) -> Result<(), ConfigError> {
        let fail =
            |problem: &str, advice| Err(ConfigError::for_file(path, problem.to_owned(), advice));
        let mut own_families = self.listen.iter().map(IpAddr::is_ipv4);
        let first = own_families.next();
        if first.is_none() || !own_families.all(|is_v4| Some(is_v4) == first) {
            let advice = "name at least one address, all IPv4 or all IPv6";
            return fail(
                "pool.listen has no addresses, or addresses of both families",
                advice,
            );
        }
        if self
            .registrars
            .iter()
            .any(|at| Some(at.address.is_ipv4()) != first || at.address.port() == 0)
        {
            let advice =
                "use addresses of the same family as pool.listen, with a port other than 0";
            return fail("a registrar cannot be reached from pool.listen", advice);
        }
        self.check_registrars(path)?;
        if !self.raw && self.encapsulation == UdpEncapsulation::Off {
            let advice = "enable raw or encapsulation";
            return fail("SCTP is enabled neither over IP nor inside UDP", advice);
        }
        if !self.announces.group.ip().is_multicast() {
            let advice = "use a multicast address such as 239.0.0.50:3863";
            return fail("multicast.group is not a multicast address", advice);
        }
        if !PATH_MTU_RANGE.contains(&self.path_mtu) {
            return fail("sctp.path_mtu is out of range", "use 576 to 65535 bytes");
        }
        if self.life < Duration::from_secs(1) {
            return fail("pool.life_ms is too short", "use 1000 or more");
        }
        Ok(())
    }
}

impl PoolConfig {
    fn check_registrars(&self, path: &Path) -> Result<(), ConfigError> {
        let fail =
            |problem: &str, advice| Err(ConfigError::for_file(path, problem.to_owned(), advice));
        let needs_tls =
            |at: &RegistrarAddress| matches!(at.transport, Some(StreamProtocol::Tls(_)));
        if self.registrars.iter().any(needs_tls) {
            if self.tls.is_none() {
                let advice = "give [tls] ca, cert and key; `holdfast ca issue` makes them";
                return fail(
                    "a registrar is over TLS, but there is no certificate",
                    advice,
                );
            }
            if self.announces.trusted {
                let advice = "disable announces and list all registrars, or use IPsec or WireGuard instead of TLS";
                return fail(
                    "multicast.announces is enabled, but anybody can send announcements without TLS",
                    advice,
                );
            }
        }
        let is_repeated = |(index, at): (usize, &RegistrarAddress)| {
            let earlier = &self.registrars[..index];
            let is_same_kind =
                |other: &&RegistrarAddress| other.transport.is_some() == at.transport.is_some();
            earlier
                .iter()
                .filter(is_same_kind)
                .any(|other| other.address == at.address)
        };
        if self.registrars.iter().enumerate().any(is_repeated) {
            return fail("a registrar is listed twice", "list each address once");
        }
        Ok(())
    }
}

/// Returns the cookie keys of a program's registration.
pub(crate) fn cookie_keys(keys: Vec<[u8; 32]>) -> Vec<CookieKey> {
    keys.into_iter().map(CookieKey).collect()
}
