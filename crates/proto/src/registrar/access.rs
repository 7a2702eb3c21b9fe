//! Permissions (RFC 5355), by address or by certificate: SCTP and TCP authenticate the former, TLS the latter.

use std::net::IpAddr;
use std::str::FromStr;

/// An address prefix, written as `10.1.0.0/16`; a single address is a prefix too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prefix {
    bits: u128,
    mask: u128,
}

/// Error for a text that is no prefix.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no address prefix; write one such as 10.1.0.0/16 or 2001:db8::/32, or tls:NAME")]
pub struct PrefixError(String);

/// Returns the address as IPv6 bits; an IPv4 address is mapped.
fn bits(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => u128::from(address.to_ipv6_mapped()),
        IpAddr::V6(address) => u128::from(address),
    }
}

impl Prefix {
    /// Returns the prefix of the first `length` bits of `address`. None if the address has fewer bits.
    pub fn new(address: IpAddr, length: u8) -> Option<Prefix> {
        let (before, whole) = match address {
            IpAddr::V4(_) => (96, 32),
            IpAddr::V6(_) => (0, 128),
        };
        if length > whole {
            return None;
        }
        let mask = u128::MAX
            .checked_shl(128 - before - u32::from(length))
            .unwrap_or(0);
        Some(Prefix {
            bits: bits(address) & mask,
            mask,
        })
    }

    /// Returns true if an address has this prefix.
    pub fn contains(&self, address: IpAddr) -> bool {
        bits(address) & self.mask == self.bits
    }
}

impl FromStr for Prefix {
    type Err = PrefixError;

    fn from_str(text: &str) -> Result<Prefix, PrefixError> {
        let parsed = match text.split_once('/') {
            None => text.parse::<IpAddr>().ok().and_then(|address| {
                let length = if address.is_ipv4() { 32 } else { 128 };
                Prefix::new(address, length)
            }),
            Some((address, length)) => match (address.parse(), length.parse()) {
                (Ok(address), Ok(length)) => Prefix::new(address, length),
                _ => None,
            },
        };
        parsed.ok_or_else(|| PrefixError(text.chars().take(60).collect()))
    }
}

/// A class of hosts that has a permission.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Who {
    /// Hosts at an address with this prefix.
    At(Prefix),
    /// Hosts with a certificate of this name, written as `tls:NAME`.
    Named(String),
    /// Hosts with any certificate, written as `tls:*`.
    Certified,
}

impl FromStr for Who {
    type Err = PrefixError;

    fn from_str(text: &str) -> Result<Who, PrefixError> {
        match text.strip_prefix("tls:") {
            None => text.parse().map(Who::At),
            Some("*") => Ok(Who::Certified),
            Some("") => Err(PrefixError(text.to_owned())),
            Some(name) => Ok(Who::Named(name.to_owned())),
        }
    }
}

/// Hosts that have a permission.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Allow {
    /// All hosts.
    Everybody,
    /// Hosts of these classes.
    Only(Vec<Who>),
}

impl Allow {
    /// Returns true if a host at this address is permitted.
    pub fn contains(&self, address: IpAddr) -> bool {
        match self {
            Allow::Everybody => true,
            Allow::Only(who) => who
                .iter()
                .any(|who| matches!(who, Who::At(prefix) if prefix.contains(address))),
        }
    }

    /// Returns true if a host with a certificate of this name is permitted, at any address.
    pub fn names(&self, name: &str) -> bool {
        let named = |who: &Who| match who {
            Who::At(_) => false,
            Who::Named(wanted) => wanted == name,
            Who::Certified => true,
        };
        matches!(self, Allow::Only(who) if who.iter().any(named))
    }

    /// Returns true if a permission requires a certificate.
    pub fn asks_for_certificates(&self) -> bool {
        matches!(self, Allow::Only(who) if who.iter().any(|who| !matches!(who, Who::At(_))))
    }
}

/// Permissions of all operations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Access {
    /// Hosts that may register and deregister elements.
    pub register: Allow,
    /// Hosts that may resolve handles and report elements.
    pub resolve: Allow,
    /// Hosts that may be a registrar of the scope, besides the mentors.
    pub registrar: Allow,
}

impl Default for Access {
    fn default() -> Access {
        Access {
            register: Allow::Everybody,
            resolve: Allow::Everybody,
            registrar: Allow::Only(Vec::new()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_counts_by_its_name() {
        let only =
            |texts: &[&str]| Allow::Only(texts.iter().map(|text| text.parse().unwrap()).collect());
        let one = only(&["10.0.0.1", "tls:web"]);
        assert!(one.names("web") && !one.names("db") && one.asks_for_certificates());
        assert!(one.contains("10.0.0.1".parse().unwrap()));
        assert!(!one.contains("10.0.0.2".parse().unwrap()));
        assert!(only(&["tls:*"]).names("db"));
        assert!(!only(&["0.0.0.0/0"]).asks_for_certificates());
        assert!("tls:".parse::<Who>().is_err());
    }

    #[test]
    fn a_prefix_holds_what_begins_so_and_nothing_else() {
        let prefix: Prefix = "10.1.0.0/16".parse().unwrap();
        let holds = |text: &str| prefix.contains(text.parse().unwrap());
        assert!(holds("10.1.255.3") && holds("::ffff:10.1.0.9"));
        assert!(!holds("10.2.0.1") && !holds("::10.1.0.1"));
        let all: Prefix = "0.0.0.0/0".parse().unwrap();
        assert!(all.contains("192.0.2.1".parse().unwrap()));
        assert!(!all.contains("2001:db8::1".parse().unwrap()));
        let one: Prefix = "2001:db8::1".parse().unwrap();
        assert!(one.contains("2001:db8::1".parse().unwrap()));
        assert!(!one.contains("2001:db8::2".parse().unwrap()));
        for wrong in ["10.0.0.0/33", "::/129", "", "a/8", "10.0.0.0/"] {
            assert!(wrong.parse::<Prefix>().is_err(), "{wrong}");
        }
    }
}
