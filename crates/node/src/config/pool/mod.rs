//! The configuration of a pool daemon: a TOML file in which every key may be absent, as may the file.

mod raw;
mod registrar_at;
#[cfg(test)]
mod tests;

pub use registrar_at::{RegistrarAt, RegistrarAtError};

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use holdfast_proto::pool_element::{CookieKey, LifeUnit};
use holdfast_proto::registrar::Prefix;
use holdfast_sys::transport::{Failure, Over};
use holdfast_wire::rserpool::asap;

use super::registrar::{ASAP_GROUP, PATH_MTU, PATH_MTU_RANGE};
use super::{ConfigError, IF_NONE_IS_NEEDED, LogConfig, LogFormat, TlsConfig, read};

/// A checked configuration of a pool daemon.
#[derive(Debug, Clone)]
pub struct PoolConfig {
    /// Its addresses, all of one family; an unspecified one stands for all of the host.
    pub listen: Vec<IpAddr>,
    /// SCTP port that registrars, and users who probe, reach it at; 0 lets the system choose.
    pub port: u16,
    /// Whether SCTP goes over IP itself, where the process may.
    pub raw: bool,
    /// SCTP inside UDP (RFC 6951).
    pub encapsulation: Encapsulation,
    /// The UDP port to reach others at; none: tried besides IP itself, at 9899.
    pub remote_encapsulation: Option<u16>,
    /// When SCTP gives up a path, an association or an attempt.
    pub failure: Failure,
    /// Largest SCTP packet with its IP header, bytes.
    pub path_mtu: u32,
    /// Sockets; emptied by a reboot.
    pub run_dir: PathBuf,
    /// Registrars; none and no announces believed: the one of this host.
    pub registrars: Vec<RegistrarAt>,
    /// Who may be a registrar of elements here, besides `registrars`.
    pub allowed: Vec<Prefix>,
    /// Who may probe elements here.
    pub probers: Vec<Prefix>,
    /// What a registration's life is counted in.
    pub life_unit: LifeUnit,
    /// How long a registration holds, where a program does not say.
    pub life: Duration,
    /// The least time between two registrations of an element that only tell how it stands.
    pub update_interval: Duration,
    /// Certificates, for registrars over TLS.
    pub tls: Option<TlsConfig>,
    /// Announces by multicast.
    pub announces: Announces,
    /// Form and filter of the log.
    pub log: LogConfig,
}

/// The local UDP port of SCTP inside UDP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Encapsulation {
    /// No such packets.
    Off,
    /// 9899, or if another process has that, one that the system chooses. None where the kernel has SCTP.
    Usual,
    /// This one; 0 lets the system choose.
    Port(u16),
}

/// `[multicast]`: how registrars are heard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Announces {
    /// Whether they are believed: anybody on the segment can send one.
    pub believed: bool,
    /// The group.
    pub group: SocketAddr,
    /// By name; none: as the routing table says.
    pub interfaces: Vec<String>,
}

impl Default for PoolConfig {
    fn default() -> PoolConfig {
        PoolConfig {
            listen: vec![Ipv4Addr::UNSPECIFIED.into()],
            port: 0,
            raw: true,
            encapsulation: Encapsulation::Usual,
            remote_encapsulation: None,
            failure: Failure::default(),
            path_mtu: PATH_MTU,
            run_dir: PathBuf::from("/run/holdfast"),
            registrars: Vec::new(),
            allowed: Vec::new(),
            probers: ["0.0.0.0/0", "::/0"]
                .iter()
                .filter_map(|all| all.parse().ok())
                .collect(),
            life_unit: LifeUnit::Milliseconds,
            life: Duration::from_secs(300),
            update_interval: Duration::from_millis(250),
            tls: None,
            announces: Announces {
                believed: false,
                group: ASAP_GROUP,
                interfaces: Vec::new(),
            },
            log: LogConfig {
                format: LogFormat::default(),
                filter: "info".to_owned(),
            },
        }
    }
}

impl PoolConfig {
    /// Reads and checks the file at `path`; without one, the defaults.
    ///
    /// # Errors
    /// The file cannot be read, is not TOML, has an unknown key, or contradicts itself.
    pub fn load(path: Option<&Path>) -> Result<PoolConfig, ConfigError> {
        let Some(path) = path else {
            return Ok(PoolConfig::default());
        };
        let text = read(path, IF_NONE_IS_NEEDED)?;
        PoolConfig::parse(path, &text)
    }

    /// Checks `text` as if it were the content of `path`.
    ///
    /// # Errors
    /// As [`PoolConfig::load`].
    pub fn parse(path: &Path, text: &str) -> Result<PoolConfig, ConfigError> {
        let raw: raw::Raw =
            toml::from_str(text).map_err(|error| ConfigError::from_toml(path, text, &error))?;
        let config = raw.checked(path, text)?;
        config.check(path)?;
        Ok(config)
    }

    /// The Unix socket of the control API.
    pub fn control_socket(&self) -> PathBuf {
        self.run_dir.join("pool.sock")
    }

    /// The Unix socket of elements' programs and of users.
    pub fn program_socket(&self) -> PathBuf {
        self.run_dir.join("pool-app.sock")
    }

    /// The registrars that are known beforehand: the one of this host, if nothing is said of any.
    pub fn known_registrars(&self) -> Vec<RegistrarAt> {
        if !self.registrars.is_empty() || self.announces.believed {
            return self.registrars.clone();
        }
        let local = match self.listen.first() {
            Some(IpAddr::V6(_)) => IpAddr::V6(std::net::Ipv6Addr::LOCALHOST),
            _ => IpAddr::V4(Ipv4Addr::LOCALHOST),
        };
        vec![RegistrarAt {
            address: SocketAddr::new(local, asap::PORT),
            over: None,
        }]
    }

    /// Whether a host with these addresses may be a registrar of elements here, over SCTP. Where announces are believed, anybody may: any
    /// host can announce itself. One that is known over TLS only may not: over SCTP anybody could be at its address.
    pub fn admits_registrar(&self, addresses: &[SocketAddr]) -> bool {
        if self.announces.believed {
            return true;
        }
        let known = self.known_registrars();
        let admitted = |address: &SocketAddr| {
            let ip = address.ip();
            let is_it = |known: &RegistrarAt| known.over.is_none() && known.address.ip() == ip;
            known.iter().any(is_it) || self.allowed.iter().any(|prefix| prefix.contains(ip))
        };
        addresses.iter().any(admitted)
    }

    /// Whether a host with one of these addresses may ask elements here how busy they are.
    pub fn admits_prober(&self, addresses: &[SocketAddr]) -> bool {
        let admitted = |prefix: &Prefix| addresses.iter().any(|at| prefix.contains(at.ip()));
        self.probers.iter().any(admitted)
    }

    /// Whether it makes sense as a whole; `path` is what errors name.
    ///
    /// # Errors
    /// It contradicts itself.
    pub fn check(&self, path: &Path) -> Result<(), ConfigError> {
        let fail =
            |problem: &str, advice| Err(ConfigError::whole_file(path, problem.to_owned(), advice));
        let mut own = self.listen.iter().map(IpAddr::is_ipv4);
        let first = own.next();
        if first.is_none() || !own.all(|is_v4| Some(is_v4) == first) {
            let advice = "name at least one address, all IPv4 or all IPv6";
            return fail("pool.listen has none or mixed addresses", advice);
        }
        if self
            .registrars
            .iter()
            .any(|at| Some(at.address.is_ipv4()) != first || at.address.port() == 0)
        {
            let advice = "name addresses of the family of pool.listen, with a port other than 0";
            return fail("a registrar cannot be reached from pool.listen", advice);
        }
        self.check_registrars(path)?;
        if !self.raw && self.encapsulation == Encapsulation::Off {
            let advice = "leave one of raw and encapsulation on";
            return fail("SCTP neither over IP nor inside UDP", advice);
        }
        if !self.announces.group.ip().is_multicast() {
            let advice = "use one such as 239.0.0.50:3863";
            return fail("multicast.group is no multicast address", advice);
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
            |problem: &str, advice| Err(ConfigError::whole_file(path, problem.to_owned(), advice));
        let needs_tls = |at: &RegistrarAt| matches!(at.over, Some(Over::Tls(_)));
        if self.registrars.iter().any(needs_tls) {
            if self.tls.is_none() {
                let advice = "give [tls] ca, cert and key; `holdfast ca issue` makes them";
                return fail("a registrar over TLS, and no certificate", advice);
            }
            if self.announces.believed {
                let advice =
                    "name all registrars, or carry them over IPsec or WireGuard instead of TLS";
                return fail(
                    "announces are believed, which anybody can send without TLS",
                    advice,
                );
            }
        }
        let same = |(index, at): (usize, &RegistrarAt)| {
            let others = &self.registrars[..index];
            let alike = |other: &&RegistrarAt| other.over.is_some() == at.over.is_some();
            others
                .iter()
                .filter(alike)
                .any(|other| other.address == at.address)
        };
        if self.registrars.iter().enumerate().any(same) {
            return fail("a registrar is named twice", "name each address once");
        }
        Ok(())
    }
}

/// The keys of a program's registration.
pub(crate) fn cookie_keys(keys: Vec<[u8; 32]>) -> Vec<CookieKey> {
    keys.into_iter().map(CookieKey).collect()
}
