//! Conversion of handles, elements, transports and policies to the types of the control API.

use std::net::{IpAddr, SocketAddr};

use holdfast_api::control::{ElementEntry, ErrorBody, PolicyDetail};
use holdfast_sctp::{SctpProvider, provider};
use holdfast_wire::rserpool::{Policy, PoolElement, PoolHandle, SctpTransport, Transport};

/// Returns the name of the SCTP provider.
pub(crate) fn sctp_provider() -> String {
    let name = match provider() {
        SctpProvider::Kernel => "kernel",
        SctpProvider::Usrsctp => "usrsctp",
    };
    name.to_owned()
}

/// Parses a handle from text, in which bytes other than printable ASCII are escaped.
pub(crate) fn parse_handle(text: &str) -> Result<PoolHandle, ErrorBody> {
    unescape(text)
        .map(|bytes| PoolHandle(bytes.into()))
        .ok_or_else(|| ErrorBody {
            error: format!("`{text}` is not the text of a pool handle"),
            what_to_do: r"write a backslash as \\, other bytes than printable ASCII as \xNN"
                .to_owned(),
        })
}

fn unescape(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut remaining = text.bytes();
    while let Some(byte) = remaining.next() {
        bytes.push(match byte {
            b'\\' => match remaining.next()? {
                b'n' => b'\n',
                b'r' => b'\r',
                b't' => b'\t',
                b'x' => {
                    let mut digit = || char::from(remaining.next()?).to_digit(16);
                    let value = digit()? << 4 | digit()?;
                    u8::try_from(value).ok()?
                }
                quoted @ (b'\\' | b'\'' | b'"') => quoted,
                _ => return None,
            },
            byte => byte,
        });
    }
    Some(bytes)
}

/// Converts an element to the API's type.
pub(crate) fn element_entry(element: &PoolElement) -> ElementEntry {
    let (transport, addresses) = transport_entry(&element.user_transport);
    ElementEntry {
        id: element.id.to_string(),
        home: element.home.to_string(),
        policy: policy_detail(&element.policy),
        registration_life: element.registration_life,
        transport: transport.to_owned(),
        addresses,
        registrar_addresses: element
            .asap_transport
            .as_ref()
            .map_or_else(Vec::new, sctp_addresses),
    }
}

/// Returns the addresses of an SCTP endpoint.
pub(crate) fn sctp_addresses(transport: &SctpTransport) -> Vec<SocketAddr> {
    let at = |address: &IpAddr| SocketAddr::new(*address, transport.port);
    transport.addresses.iter().map(at).collect()
}

/// Returns a transport's name and addresses.
pub(crate) fn transport_entry(transport: &Transport) -> (&'static str, Vec<SocketAddr>) {
    let single_address = |address: &IpAddr, port: &u16| vec![SocketAddr::new(*address, *port)];
    match transport {
        Transport::Sctp(transport) => ("sctp", sctp_addresses(transport)),
        Transport::Tcp { port, address, .. } => ("tcp", single_address(address, port)),
        Transport::Udp { port, address } => ("udp", single_address(address, port)),
        Transport::UdpLite { port, address } => ("udp-lite", single_address(address, port)),
        Transport::Dccp { port, address, .. } => ("dccp", single_address(address, port)),
        Transport::Opaque(_) => ("opaque", Vec::new()),
    }
}

/// Returns a policy's name and parameters.
pub(crate) fn policy_detail(policy: &Policy) -> PolicyDetail {
    let share = |value: u32| f64::from(value) / f64::from(u32::MAX);
    let (weight, priority) = match *policy {
        Policy::WeightedRoundRobin { weight }
        | Policy::WeightedRandom { weight }
        | Policy::WeightedRandomDpf { weight, .. } => (Some(weight), None),
        Policy::Priority { priority } => (None, Some(priority)),
        _ => (None, None),
    };
    let (load, degradation) = load_and_degradation(policy);
    let (delay_penalty, distance_ms) = match *policy {
        Policy::WeightedRandomDpf { dpf, distance, .. }
        | Policy::LeastUsedDpf { dpf, distance, .. }
        | Policy::LeastUsedDegradationDpf { dpf, distance, .. }
        | Policy::PriorityLeastUsedDpf { dpf, distance, .. }
        | Policy::PriorityLeastUsedDegradationDpf { dpf, distance, .. } => {
            (Some(dpf), Some(distance))
        }
        _ => (None, None),
    };
    PolicyDetail {
        name: policy.kind().to_string(),
        weight,
        priority,
        load: load.map(share),
        degradation: degradation.map(share),
        delay_penalty: delay_penalty.map(share),
        distance_ms,
    }
}

/// Returns a policy's load and load degradation.
fn load_and_degradation(policy: &Policy) -> (Option<u32>, Option<u32>) {
    match *policy {
        Policy::LeastUsed { load }
        | Policy::RandomizedLeastUsed { load }
        | Policy::LeastUsedDpf { load, .. } => (Some(load), None),
        Policy::LeastUsedDegradation { load, degradation }
        | Policy::PriorityLeastUsed { load, degradation }
        | Policy::RandomizedPriorityLeastUsed { load, degradation }
        | Policy::RandomizedLeastUsedDegradation { load, degradation }
        | Policy::PriorityLeastUsedDegradation { load, degradation }
        | Policy::RandomizedPriorityLeastUsedDegradation { load, degradation }
        | Policy::LeastUsedDegradationDpf {
            load, degradation, ..
        }
        | Policy::PriorityLeastUsedDpf {
            load, degradation, ..
        }
        | Policy::PriorityLeastUsedDegradationDpf {
            load, degradation, ..
        } => (Some(load), Some(degradation)),
        _ => (None, None),
    }
}

#[cfg(test)]
mod tests {
    use holdfast_wire::rserpool::PolicyKind;

    use super::*;

    #[test]
    fn handle_survives_its_text() {
        let every_byte = PoolHandle((0..=255).collect::<Vec<u8>>().into());
        assert_eq!(parse_handle(&every_byte.to_string()).ok(), Some(every_byte));
        for wrong in ["\\", "\\x", "\\x1", "\\xzz", "\\q"] {
            assert!(parse_handle(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn policy_detail_has_the_policy_parameters() {
        let (load, degradation) = (u32::MAX, 0);
        let detail = policy_detail(&Policy::PriorityLeastUsed { load, degradation });
        assert_eq!((detail.name.as_str(), detail.load), ("PLU", Some(1.0)));
        assert_eq!((detail.degradation, detail.weight), (Some(0.0), None));
        let weights = |policy: Policy| self::policy_detail(&policy).weight.is_some();
        let loads = |policy: Policy| self::policy_detail(&policy).load.is_some();
        let distances = |policy: Policy| self::policy_detail(&policy).distance_ms.is_some();
        for kind in PolicyKind::ALL {
            let (name, zeroed) = (kind.name(), kind.zeroed());
            let has_weight = name.starts_with('W');
            let has_load = name.contains('L');
            assert_eq!(weights(zeroed), has_weight, "{name}");
            assert_eq!(loads(zeroed), has_load, "{name}");
            assert_eq!(distances(zeroed), name.ends_with("-DPF"), "{name}");
        }
    }
}
