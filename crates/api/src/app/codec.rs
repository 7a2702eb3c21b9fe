//! Encoding and decoding of messages.

use serde::{Serialize, de::DeserializeOwned};

use super::{MESSAGE_BYTES_MAX, PROTOCOL_VERSION};

/// The reason that bytes are not a message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The packet is empty.
    #[error("an empty message")]
    Empty,
    /// Longer than [`MESSAGE_BYTES_MAX`].
    #[error("a message of {0} bytes, more than {MESSAGE_BYTES_MAX}")]
    TooLong(usize),
    /// The other side uses another version.
    #[error(
        "the message has protocol version {0}, this is version {PROTOCOL_VERSION}: update the older side"
    )]
    Version(u8),
    /// The message is truncated, or of an unknown kind.
    #[error("a malformed message: {0}")]
    Malformed(postcard::Error),
    /// Bytes follow the end of the message.
    #[error("{0} bytes after the end of a message")]
    Trailing(usize),
}

/// The reason that a value cannot be sent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    /// Longer than [`MESSAGE_BYTES_MAX`]: the sender did not split it.
    #[error("a message of {0} bytes, more than {MESSAGE_BYTES_MAX}")]
    TooLong(usize),
    /// The value has no encoding (a sequence of unknown length; no message of this crate has one).
    #[error("cannot be encoded: {0}")]
    Unencodable(postcard::Error),
}

/// Encodes `message` as one packet: the version byte, then postcard.
///
/// # Errors
/// See [`EncodeError`].
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, EncodeError> {
    let bytes =
        postcard::to_extend(message, vec![PROTOCOL_VERSION]).map_err(EncodeError::Unencodable)?;
    match bytes.len() {
        long if long > MESSAGE_BYTES_MAX => Err(EncodeError::TooLong(long)),
        _ => Ok(bytes),
    }
}

/// Decodes the message in a packet.
///
/// # Errors
/// See [`DecodeError`]. Never panics; allocates no more than in proportion to `packet`.
pub fn decode<T: DeserializeOwned>(packet: &[u8]) -> Result<T, DecodeError> {
    if packet.len() > MESSAGE_BYTES_MAX {
        return Err(DecodeError::TooLong(packet.len()));
    }
    match packet {
        [] => Err(DecodeError::Empty),
        [PROTOCOL_VERSION, body @ ..] => match postcard::take_from_bytes(body) {
            Ok((message, [])) => Ok(message),
            Ok((_, rest)) => Err(DecodeError::Trailing(rest.len())),
            Err(error) => Err(DecodeError::Malformed(error)),
        },
        [version, ..] => Err(DecodeError::Version(*version)),
    }
}

/// Bytes available for a message's list, after its other fields: names and reasons stay well below 1 KiB.
const LIST_BYTES_MAX: usize = MESSAGE_BYTES_MAX - 2048;

/// Splits a list into runs that each fit one message, with at most `count_max` items each
/// ([`DESCRIPTORS_MAX`](super::DESCRIPTORS_MAX) if each has a descriptor). Order is kept; no run is empty.
///
/// An item that is too long for a message gets its own run, and [`encode`] then refuses the run.
pub fn split<T: Serialize>(items: Vec<T>, count_max: usize) -> Vec<Vec<T>> {
    let mut runs: Vec<Vec<T>> = Vec::new();
    let mut used = 0;
    for item in items {
        let length = postcard::experimental::serialized_size(&item).unwrap_or(LIST_BYTES_MAX);
        match runs.last_mut() {
            Some(run) if run.len() < count_max && used + length <= LIST_BYTES_MAX => {
                run.push(item);
                used += length;
            }
            _ => {
                runs.push(vec![item]);
                used = length;
            }
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::app::{
        DESCRIPTORS_MAX, DatagramPiece, FromDaemon, HandOffItem, IncomingItem, ReclaimItem,
        ReclaimedFlowState, StateItem, ToDaemon,
    };
    use crate::{Drain, FlowText, Protocol};

    fn flow_strategy() -> impl Strategy<Value = FlowText> {
        (
            any::<bool>(),
            any::<([u8; 4], [u8; 4], u16, u16)>(),
            any::<bool>(),
        )
            .prop_map(|(udp, (l, r, lp, rp), six)| {
                let wide = |a: [u8; 4]| {
                    [
                        0xfd, 0, a[0], a[1], a[2], a[3], 0, 0, 0, 0, 0, 0, 0, 0, 0, 1,
                    ]
                };
                let protocol = if udp { Protocol::Udp } else { Protocol::Tcp };
                match six {
                    true => FlowText::new(protocol, (wide(l), lp).into(), (wide(r), rp).into()),
                    false => FlowText::new(protocol, (l, lp).into(), (r, rp).into()),
                }
                .unwrap()
            })
    }

    fn flows_strategy() -> impl Strategy<Value = Vec<FlowText>> {
        prop::collection::vec(flow_strategy(), 0..20)
    }

    fn bytes_strategy() -> impl Strategy<Value = Vec<u8>> {
        prop::collection::vec(any::<u8>(), 0..300)
    }

    fn pieces_strategy() -> impl Strategy<Value = Vec<DatagramPiece>> {
        prop::collection::vec(
            (bytes_strategy(), any::<bool>()).prop_map(|(bytes, more)| DatagramPiece {
                bytes,
                is_continued: more,
            }),
            0..5,
        )
    }

    fn drain_strategy() -> impl Strategy<Value = Drain> {
        prop_oneof![
            Just(Drain::None),
            any::<u32>().prop_map(|max_wait_ms| Drain::First { max_wait_ms })
        ]
    }

    fn to_daemon_strategy() -> impl Strategy<Value = ToDaemon> {
        let hand_off_item = (flow_strategy(), bytes_strategy(), any::<bool>()).prop_map(
            |(flow, application_state, descriptor)| HandOffItem {
                flow,
                application_state,
                descriptor,
            },
        );
        let state = prop_oneof![
            ".{0,9}".prop_map(|to| ReclaimedFlowState::Donated { to }),
            any::<(u64, bool)>()
                .prop_map(|(id, received)| ReclaimedFlowState::Incoming { id, received }),
        ];
        let reclaim_item = (flow_strategy(), any::<u32>(), state, any::<bool>()).prop_map(
            |(flow, service, state, descriptor)| ReclaimItem {
                flow,
                service,
                state,
                descriptor,
            },
        );
        prop_oneof![
            ".{0,9}".prop_map(|name| ToDaemon::Open { name }),
            (any::<u32>(), ".{0,9}", flow_strategy()).prop_map(|(service, pool, f)| {
                ToDaemon::Serve {
                    service,
                    pool,
                    protocol: f.protocol(),
                    addresses: vec![f.local(), f.remote()],
                }
            }),
            any::<u32>().prop_map(|service| ToDaemon::Withdraw { service }),
            (any::<u32>(), flows_strategy())
                .prop_map(|(service, flows)| ToDaemon::Accepted { service, flows }),
            flows_strategy().prop_map(|flows| ToDaemon::Closed { flows }),
            (
                any::<u64>(),
                ".{0,9}",
                drain_strategy(),
                prop::collection::vec(hand_off_item, 0..9),
                any::<bool>()
            )
                .prop_map(|(batch, to, drain, items, last)| ToDaemon::HandOff {
                    batch,
                    to,
                    drain,
                    items,
                    last
                }),
            (flows_strategy(), ".{0,9}")
                .prop_map(|(flows, reason)| ToDaemon::Declined { flows, reason }),
            (flow_strategy(), pieces_strategy(), any::<bool>())
                .prop_map(|(flow, unread, last)| ToDaemon::Collected { flow, unread, last }),
            any::<Vec<u64>>().prop_map(|ids| ToDaemon::Received { ids }),
            (any::<Vec<u64>>(), ".{0,9}")
                .prop_map(|(ids, reason)| ToDaemon::Refused { ids, reason }),
            prop::collection::vec(reclaim_item, 0..9).prop_map(|items| ToDaemon::Reclaim { items }),
        ]
    }

    fn from_daemon_strategy() -> impl Strategy<Value = FromDaemon> {
        let incoming_item = (any::<(u64, u32, bool)>(), flow_strategy()).prop_map(
            |((id, service, descriptor), flow)| IncomingItem {
                id,
                service,
                flow,
                descriptor,
            },
        );
        prop_oneof![
            ".{0,9}".prop_map(|node| FromDaemon::Opened { node }),
            (flows_strategy(), ".{0,9}", drain_strategy())
                .prop_map(|(flows, to, drain)| FromDaemon::HandoffRequested { flows, to, drain }),
            prop::collection::vec(incoming_item, 0..9)
                .prop_map(|items| FromDaemon::Incoming { items }),
            (
                any::<u64>(),
                bytes_strategy(),
                pieces_strategy(),
                any::<bool>()
            )
                .prop_map(|(id, application_state, unread, last)| {
                    FromDaemon::State {
                        id,
                        application_state,
                        unread,
                        last,
                    }
                }),
            any::<Vec<u64>>().prop_map(|ids| FromDaemon::Activate { ids }),
            (any::<Vec<u64>>(), ".{0,9}")
                .prop_map(|(ids, reason)| FromDaemon::Cancel { ids, reason }),
            flows_strategy().prop_map(|flows| FromDaemon::Collect { flows }),
            (flows_strategy(), ".{0,9}").prop_map(|(flows, to)| FromDaemon::Moved { flows, to }),
            (flows_strategy(), ".{0,9}")
                .prop_map(|(flows, reason)| FromDaemon::Kept { flows, reason }),
            ".{0,9}".prop_map(|text| FromDaemon::Error { text }),
            prop::collection::vec((any::<u64>(), bytes_strategy()), 0..9).prop_map(|items| {
                let item = |(id, application_state)| StateItem {
                    id,
                    application_state,
                };
                FromDaemon::States {
                    items: items.into_iter().map(item).collect(),
                }
            }),
        ]
    }

    #[test]
    fn malformed_packets_are_refused_by_name() {
        assert_eq!(decode::<ToDaemon>(&[]), Err(DecodeError::Empty));
        assert_eq!(decode::<ToDaemon>(&[9, 0, 0]), Err(DecodeError::Version(9)));
        assert_eq!(
            decode::<ToDaemon>(&vec![1; 70_000]),
            Err(DecodeError::TooLong(70_000))
        );
        let mut bytes = encode(&ToDaemon::Withdraw { service: 3 }).unwrap();
        bytes.push(0);
        assert_eq!(decode::<ToDaemon>(&bytes), Err(DecodeError::Trailing(1)));
        let long = ToDaemon::Open {
            name: "x".repeat(61 * 1024),
        };
        assert!(matches!(encode(&long), Err(EncodeError::TooLong(_))));
    }

    #[test]
    fn length_field_alone_allocates_no_memory() {
        // Received{ids} that claims 2^60 ids: postcard limits its allocation, and then reaches the end of the bytes.
        let mut bytes = encode(&ToDaemon::Received { ids: vec![] }).unwrap();
        bytes.pop();
        bytes.extend([0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x0f]);
        assert!(matches!(
            decode::<ToDaemon>(&bytes),
            Err(DecodeError::Malformed(_))
        ));
    }

    proptest! {
        #[test]
        fn to_daemon_survives(message in to_daemon_strategy()) {
            prop_assert_eq!(decode::<ToDaemon>(&encode(&message).unwrap()).unwrap(), message);
        }

        #[test]
        fn from_daemon_survives(message in from_daemon_strategy()) {
            prop_assert_eq!(decode::<FromDaemon>(&encode(&message).unwrap()).unwrap(), message);
        }

        #[test]
        fn a_truncated_message_is_refused(message in to_daemon_strategy(), cut: prop::sample::Index) {
            let bytes = encode(&message).unwrap();
            prop_assert!(decode::<ToDaemon>(&bytes[..cut.index(bytes.len())]).is_err());
        }

        #[test]
        fn any_bytes_are_a_value_or_an_error(mut bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
            if let Some(version) = bytes.first_mut() {
                *version = PROTOCOL_VERSION;
            }
            let _ = decode::<ToDaemon>(&bytes);
            let _ = decode::<FromDaemon>(&bytes);
        }

        #[test]
        fn split_keeps_all_in_order_and_within_bounds(lengths in prop::collection::vec(0..40_000usize, 0..200)) {
            let flow: FlowText = "tcp:10.0.0.1:80-10.0.1.2:4242".parse().unwrap();
            let items: Vec<_> = lengths
                .iter()
                .map(|&n| HandOffItem { flow, application_state: vec![7; n], descriptor: true })
                .collect();
            let runs = split(items.clone(), DESCRIPTORS_MAX);
            for run in &runs {
                prop_assert!(!run.is_empty() && run.len() <= DESCRIPTORS_MAX);
                let message = ToDaemon::HandOff {
                    batch: u64::MAX, to: "n".repeat(255), drain: Drain::None, items: run.clone(), last: true,
                };
                prop_assert!(encode(&message).is_ok());
            }
            prop_assert_eq!(runs.concat(), items);
        }
    }
}
