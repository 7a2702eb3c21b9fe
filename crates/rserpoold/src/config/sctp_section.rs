//! The section `[sctp]`, which registrars and pool daemons have.

use holdfast_sctp::FailureDetection;
use serde::Deserialize;

use super::optional_keys::{set_if_present, set_ms};

/// Largest SCTP packet inside UDP that fits an ordinary network, in bytes.
pub(super) const PATH_MTU: u32 = 1400;
/// Allowed path MTUs: at least the minimum of an IPv4 or IPv6 path, at most the maximum of the stacks.
pub(super) const PATH_MTU_RANGE: std::ops::RangeInclusive<u32> = 576..=65_535;

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
pub(super) struct SctpConfigSection {
    rto_initial_ms: Option<u64>,
    rto_min_ms: Option<u64>,
    rto_max_ms: Option<u64>,
    heartbeat_ms: Option<u64>,
    path_retransmissions: Option<u16>,
    association_retransmissions: Option<u16>,
    init_retransmissions: Option<u16>,
    path_mtu: Option<u32>,
}

impl SctpConfigSection {
    pub(super) fn apply(self, failure: &mut FailureDetection, path_mtu: &mut u32) {
        set_if_present(path_mtu, self.path_mtu);
        set_ms(&mut failure.rto_initial, self.rto_initial_ms);
        set_ms(&mut failure.rto_min, self.rto_min_ms);
        set_ms(&mut failure.rto_max, self.rto_max_ms);
        set_ms(&mut failure.heartbeat, self.heartbeat_ms);
        let path = self.path_retransmissions;
        set_if_present(&mut failure.path_retransmissions, path);
        let association = self.association_retransmissions;
        set_if_present(&mut failure.association_retransmissions, association);
        set_if_present(&mut failure.init_retransmissions, self.init_retransmissions);
    }
}
