//! Parser of the text of a flow.

use holdfast_wire::Flow;

/// Parses any text to a flow with a text that parses to the same flow, or to an error that describes the format.
pub fn run(data: &[u8]) -> bool {
    let text = String::from_utf8_lossy(data);
    match text.parse::<Flow>() {
        Ok(flow) => {
            assert_eq!(flow.to_string().parse(), Ok(flow), "{text:?}");
            assert_eq!(flow.local.is_ipv6(), flow.remote.is_ipv6(), "{text:?}");
            true
        }
        Err(error) => {
            assert!(!error.to_string().is_empty());
            false
        }
    }
}
