//! Permissions (RFC 5355), by address or by certificate: SCTP and TCP authenticate the former, TLS the latter.

use std::net::IpAddr;
use std::str::FromStr;

/// An address prefix, written as `10.1.0.0/16`; a single address is a prefix too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AddressPrefix {
    bits: u128,
    mask: u128,
}

/// Error for a text that is no prefix.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is not an address prefix; write one such as 10.1.0.0/16 or 2001:db8::/32, or tls:NAME"
)]
pub struct AddressPrefixError(String);

/// Returns the address as IPv6 bits; an IPv4 address is mapped.
fn ipv6_bits(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => u128::from(address.to_ipv6_mapped()),
        IpAddr::V6(address) => u128::from(address),
    }
}

impl AddressPrefix {
    /// Returns the prefix of the first `length` bits of `address`. None if the address has fewer bits.
    pub fn new(address: IpAddr, length: u8) -> Option<AddressPrefix> {
        let (mapped_bits, length_max) = match address {
            IpAddr::V4(_) => (96, 32),
            IpAddr::V6(_) => (0, 128),
        };
        if length > length_max {
            return None;
        }
        let mask = u128::MAX
            .checked_shl(128 - mapped_bits - u32::from(length))
            .unwrap_or(0);
        Some(AddressPrefix {
            bits: ipv6_bits(address) & mask,
            mask,
        })
    }

    /// Returns true if an address has this prefix.
    pub fn contains(&self, address: IpAddr) -> bool {
        ipv6_bits(address) & self.mask == self.bits
    }
}

impl FromStr for AddressPrefix {
    type Err = AddressPrefixError;

    fn from_str(text: &str) -> Result<AddressPrefix, AddressPrefixError> {
        let parsed = match text.split_once('/') {
            None => text.parse::<IpAddr>().ok().and_then(|address| {
                let length = if address.is_ipv4() { 32 } else { 128 };
                AddressPrefix::new(address, length)
            }),
            Some((address, length)) => match (address.parse(), length.parse()) {
                (Ok(address), Ok(length)) => AddressPrefix::new(address, length),
                _ => None,
            },
        };
        parsed.ok_or_else(|| AddressPrefixError(text.chars().take(60).collect()))
    }
}

/// A class of hosts that has a permission.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HostClass {
    /// Hosts at an address with this prefix.
    Address(AddressPrefix),
    /// Hosts with a certificate of this name, written as `tls:NAME`.
    Named(String),
    /// Hosts with any certificate, written as `tls:*`.
    Certified,
}

impl FromStr for HostClass {
    type Err = AddressPrefixError;

    fn from_str(text: &str) -> Result<HostClass, AddressPrefixError> {
        match text.strip_prefix("tls:") {
            None => text.parse().map(HostClass::Address),
            Some("*") => Ok(HostClass::Certified),
            Some("") => Err(AddressPrefixError(text.to_owned())),
            Some(name) => Ok(HostClass::Named(name.to_owned())),
        }
    }
}

/// Hosts that have a permission.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PermittedHosts {
    /// All hosts.
    Everyone,
    /// Hosts of these classes.
    Only(Vec<HostClass>),
}

impl PermittedHosts {
    /// Returns true if a host at this address is permitted.
    pub fn permits_address(&self, address: IpAddr) -> bool {
        match self {
            PermittedHosts::Everyone => true,
            PermittedHosts::Only(who) => who
                .iter()
                .any(|who| matches!(who, HostClass::Address(prefix) if prefix.contains(address))),
        }
    }

    /// Returns true if a host with a certificate of this name is permitted, at any address.
    pub fn permits_name(&self, name: &str) -> bool {
        let matches_name = |class: &HostClass| match class {
            HostClass::Address(_) => false,
            HostClass::Named(wanted) => wanted == name,
            HostClass::Certified => true,
        };
        matches!(self, PermittedHosts::Only(who) if who.iter().any(matches_name))
    }

    /// Returns true if a permission requires a certificate.
    pub fn requires_certificates(&self) -> bool {
        matches!(self, PermittedHosts::Only(who) if who.iter().any(|who| !matches!(who, HostClass::Address(_))))
    }
}

/// Permissions of all operations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OperationPermissions {
    /// Hosts that may register and deregister elements.
    pub register: PermittedHosts,
    /// Hosts that may resolve handles and report elements.
    pub resolve: PermittedHosts,
    /// Hosts that may be a registrar of the scope, besides the mentors.
    pub registrar: PermittedHosts,
}

impl Default for OperationPermissions {
    fn default() -> OperationPermissions {
        OperationPermissions {
            register: PermittedHosts::Everyone,
            resolve: PermittedHosts::Everyone,
            registrar: PermittedHosts::Only(Vec::new()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn certificate_is_matched_by_name() {
        let permit_only = |texts: &[&str]| {
            PermittedHosts::Only(texts.iter().map(|text| text.parse().unwrap()).collect())
        };
        let one = permit_only(&["10.0.0.1", "tls:web"]);
        assert!(one.permits_name("web") && !one.permits_name("db") && one.requires_certificates());
        assert!(one.permits_address("10.0.0.1".parse().unwrap()));
        assert!(!one.permits_address("10.0.0.2".parse().unwrap()));
        assert!(permit_only(&["tls:*"]).permits_name("db"));
        assert!(!permit_only(&["0.0.0.0/0"]).requires_certificates());
        assert!("tls:".parse::<HostClass>().is_err());
    }

    #[test]
    fn prefix_contains_only_its_addresses() {
        let prefix: AddressPrefix = "10.1.0.0/16".parse().unwrap();
        let contains = |text: &str| prefix.contains(text.parse().unwrap());
        assert!(contains("10.1.255.3") && contains("::ffff:10.1.0.9"));
        assert!(!contains("10.2.0.1") && !contains("::10.1.0.1"));
        let all: AddressPrefix = "0.0.0.0/0".parse().unwrap();
        assert!(all.contains("192.0.2.1".parse().unwrap()));
        assert!(!all.contains("2001:db8::1".parse().unwrap()));
        let one: AddressPrefix = "2001:db8::1".parse().unwrap();
        assert!(one.contains("2001:db8::1".parse().unwrap()));
        assert!(!one.contains("2001:db8::2".parse().unwrap()));
        for invalid in ["10.0.0.0/33", "::/129", "", "a/8", "10.0.0.0/"] {
            assert!(invalid.parse::<AddressPrefix>().is_err(), "{invalid}");
        }
    }
}
