//! Who may do what, by address (RFC 5355): the associations below authenticate addresses, TLS or IPsec more.

use std::net::IpAddr;
use std::str::FromStr;

/// All addresses that begin alike, written as `10.1.0.0/16`; a single address is one too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prefix {
    bits: u128,
    mask: u128,
}

/// The text is no prefix.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no address prefix; write one such as 10.1.0.0/16 or 2001:db8::/32")]
pub struct PrefixError(String);

/// An IPv4 address is seen as the IPv6 address that maps it.
fn bits(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => u128::from(address.to_ipv6_mapped()),
        IpAddr::V6(address) => u128::from(address),
    }
}

impl Prefix {
    /// The addresses whose first `length` bits are those of `address`. None if it has not so many.
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

    /// Whether an address begins so.
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

/// Which addresses may do something.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Allow {
    /// All.
    Everybody,
    /// Those with one of these prefixes.
    Only(Vec<Prefix>),
}

impl Allow {
    /// Whether this address may.
    pub fn contains(&self, address: IpAddr) -> bool {
        match self {
            Allow::Everybody => true,
            Allow::Only(prefixes) => prefixes.iter().any(|prefix| prefix.contains(address)),
        }
    }
}

/// Who may do what.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Access {
    /// Register and deregister elements.
    pub register: Allow,
    /// Resolve handles and report elements.
    pub resolve: Allow,
    /// Be a registrar of the scope, besides the mentors.
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
