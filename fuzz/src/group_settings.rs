//! The group's settings, and requests to change them.

use crate::frame::decode;
use holdfast_wire::Frame;
use holdfast_wire::group_data::{GroupNodes, GroupSettings};
use holdfast_wire::membership_frames::{GROUP_DATA_BYTES_MAX, MembershipFrame};
use std::net::IpAddr;

/// Decodes settings from the bytes after the length that the first two bytes give, and applies the change requests of
/// the stream that follows. Settings survive encoding and decoding after each change, and are no longer than the
/// requests can account for.
pub fn run(data: &[u8]) -> bool {
    let Some((length, rest)) = data.split_first_chunk::<2>() else {
        return false;
    };
    let length = usize::from(u16::from_be_bytes(*length)).min(rest.len());
    let (encoded, stream) = rest.split_at(length);
    let mut settings = match GroupSettings::decode(encoded) {
        Ok(settings) => settings,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return false;
        }
    };
    check_round_trip(&settings);
    let nodes = nodes();
    let mut is_changed = false;
    for frame in decode(stream, 1 << 20) {
        let Frame::Membership(MembershipFrame::GroupChangeRequest { id, change, .. }) = frame
        else {
            continue;
        };
        assert!(!change.to_string().is_empty());
        match settings.apply(id, &change, &nodes) {
            Ok(next) => {
                assert!(next.has_change(id));
                check_round_trip(&next);
                settings = next;
                is_changed = true;
            }
            Err(refusal) => assert!(!refusal.to_string().is_empty()),
        }
    }
    is_changed
}

/// Returns the nodes `n1` to `n3` at 10.0.0.1 to 10.0.0.3.
fn nodes() -> GroupNodes {
    let numbers = 1..=3_u8;
    GroupNodes {
        names: (numbers.clone())
            .map(|number| crate::membership::node_name(number.into()))
            .collect(),
        addresses: numbers
            .map(|number| IpAddr::from([10, 0, 0, number]))
            .collect(),
    }
}

fn check_round_trip(settings: &GroupSettings) {
    let bytes = settings.encode().expect("settings can be encoded");
    if bytes.len() <= GROUP_DATA_BYTES_MAX {
        assert_eq!(GroupSettings::decode(&bytes).as_ref(), Ok(settings));
    }
}
