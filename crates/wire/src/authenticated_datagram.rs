//! Small frames between the nodes of a group in UDP datagrams, authenticated by a key for each sender and receiver.
//!
//! A datagram consists of (integers big endian):
//!
//! | bytes | content |
//! | --- | --- |
//! | 2 | `Hd` |
//! | 1 | version, 2 |
//! | 8 | start number of the sender's daemon |
//! | 8 | start number of the receiver's daemon |
//! | 8 | counter: number of the datagram since the sender's start |
//! | 1 | length of the sender's name |
//! | 1 to 40 | the sender's name |
//! | any | a [`DatagramFrame`] in postcard |
//! | 32 | authentication code: HMAC-SHA-256 (RFC 2104) |
//!
//! The receiver chooses the key, at random, and gives it to the sender over the channel with certificates
//! ([`crate::frame::GenericFrame::DatagramAuthenticationKey`]). A node can therefore speak for itself alone, and a datagram that was
//! recorded before a restart of either daemon is worthless. The code covers the receiver's name too, which does not travel.
//! The content is not secret; a frame that carries secrets needs the channel.

use crate::membership_frames::{
    Heartbeat, JoinNumber, MembershipFrame, NODE_NAME_BYTES_MAX, NodeName,
};
use hmac::{Hmac, KeyInit, Mac};
use serde::{Deserialize, Serialize};
use sha2::Sha256;
use std::collections::BTreeMap;
use std::fmt;

/// Maximum length of a datagram, in bytes: fits into one packet of any path.
pub const DATAGRAM_BYTES_MAX: usize = 1_200;
/// Maximum number of senders whose counters a receiver remembers.
pub const SENDERS_MAX: usize = 8_192;

const MAGIC: [u8; 2] = *b"Hd";
const VERSION: u8 = 2;
/// Length of the fields before the sender's name.
const HEAD_BYTES: usize = 28;
const CODE_BYTES: usize = 32;
/// Separates these codes from other uses of a key.
const LABEL: &[u8] = b"holdfast datagram 2";
/// Number of counters behind the highest one that may still arrive (RFC 4303, section 3.4.3).
const WINDOW: u64 = 64;

/// Length of a [`DatagramAuthenticationKey`], in bytes.
pub const DATAGRAM_KEY_BYTES: usize = 32;

/// The key of the datagrams from one node to another one.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct DatagramAuthenticationKey(pub [u8; DATAGRAM_KEY_BYTES]);

/// No content: the secret must not appear in logs.
impl fmt::Debug for DatagramAuthenticationKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DatagramAuthenticationKey")
    }
}

/// The keys that a node and another one have agreed on, for the present lives of both daemons. The keys of another start
/// number must be others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PairKeys {
    /// Start number of the other node's daemon.
    pub boot: u64,
    /// Key of the datagrams from the other node, which this node has chosen.
    pub inbound: DatagramAuthenticationKey,
    /// Key of the datagrams to the other node; none until the other node has told it.
    pub outbound: Option<DatagramAuthenticationKey>,
}

/// The frames that travel in datagrams. The order of the variants is part of the format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum DatagramFrame {
    /// [`MembershipFrame::Heartbeat`].
    Heartbeat(Heartbeat),
    /// [`MembershipFrame::LeaseGrant`].
    LeaseGrant {
        /// Epoch of the heartbeat.
        epoch: u64,
        /// Start number in the heartbeat.
        boot: u64,
        /// Number of the heartbeat.
        sequence: u64,
        /// Join of the sender.
        join: JoinNumber,
    },
}

impl DatagramFrame {
    /// Returns the form in which a frame travels in a datagram; none if the frame needs a channel with certificates.
    pub fn of(frame: &MembershipFrame) -> Option<DatagramFrame> {
        match *frame {
            MembershipFrame::Heartbeat(heartbeat) => Some(DatagramFrame::Heartbeat(heartbeat)),
            MembershipFrame::LeaseGrant {
                epoch,
                boot,
                sequence,
                join,
            } => Some(DatagramFrame::LeaseGrant {
                epoch,
                boot,
                sequence,
                join,
            }),
            _ => None,
        }
    }
}

impl From<DatagramFrame> for MembershipFrame {
    fn from(frame: DatagramFrame) -> MembershipFrame {
        match frame {
            DatagramFrame::Heartbeat(heartbeat) => MembershipFrame::Heartbeat(heartbeat),
            DatagramFrame::LeaseGrant {
                epoch,
                boot,
                sequence,
                join,
            } => MembershipFrame::LeaseGrant {
                epoch,
                boot,
                sequence,
                join,
            },
        }
    }
}

/// Reason for refusing a datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum DatagramError {
    /// The bytes are not a datagram of this format.
    #[error(
        "the bytes are not a datagram between nodes; check that the sender is a holdfastd of the same release"
    )]
    Malformed,
    /// The receiver has agreed on no key with the sender.
    #[error(
        "the datagram's sender has no key of this node; the key follows when the two nodes are connected"
    )]
    UnknownSender,
    /// The datagram belongs to another life of the sender's or the receiver's daemon.
    #[error("the datagram is from before a restart of its sender or of this node")]
    Stale,
    /// The code is not that of the key.
    #[error(
        "the datagram's authentication code is wrong; another host than the named one has sent it, or it was for another \
         node"
    )]
    Forged,
    /// The datagram was received before, or is too late.
    #[error("the datagram repeats an earlier one, or comes too late")]
    Replayed,
}

impl DatagramError {
    /// All reasons, in the words of metrics.
    pub const LABELS: [&'static str; 5] =
        ["malformed", "unknown_sender", "stale", "forged", "replayed"];

    /// Returns the reason in one word, for metrics.
    pub fn label(self) -> &'static str {
        match self {
            DatagramError::Malformed => "malformed",
            DatagramError::UnknownSender => "unknown_sender",
            DatagramError::Stale => "stale",
            DatagramError::Forged => "forged",
            DatagramError::Replayed => "replayed",
        }
    }
}

/// Makes the datagrams of one start of a daemon.
#[derive(Debug)]
pub struct DatagramSender {
    name: NodeName,
    boot: u64,
    counter: u64,
}

impl DatagramSender {
    /// Returns the sender of the node `name` whose daemon has the start number `boot`.
    pub fn new(name: NodeName, boot: u64) -> DatagramSender {
        DatagramSender {
            name,
            boot,
            counter: 0,
        }
    }

    /// Returns the datagram for the node `receiver`, whose daemon has the start number `receiver_boot` and has told `key`.
    pub fn seal(
        &mut self,
        receiver: &NodeName,
        receiver_boot: u64,
        key: &DatagramAuthenticationKey,
        frame: &DatagramFrame,
    ) -> Vec<u8> {
        self.counter += 1;
        let name = self.name.as_str().as_bytes();
        let mut bytes = Vec::with_capacity(HEAD_BYTES + name.len() + 64 + CODE_BYTES);
        bytes.extend_from_slice(&MAGIC);
        bytes.push(VERSION);
        bytes.extend_from_slice(&self.boot.to_be_bytes());
        bytes.extend_from_slice(&receiver_boot.to_be_bytes());
        bytes.extend_from_slice(&self.counter.to_be_bytes());
        bytes.push(name.len() as u8);
        bytes.extend_from_slice(name);
        // Writing numbers to memory cannot fail.
        bytes = postcard::to_extend(frame, bytes).unwrap_or_default();
        let code = authentication_code(key, receiver, &bytes).finalize();
        bytes.extend_from_slice(&code.into_bytes());
        bytes
    }
}

/// A datagram that passed all checks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpenedDatagram {
    /// Name of the node that sent the datagram.
    pub sender: NodeName,
    /// The frame that the datagram carried.
    pub frame: DatagramFrame,
}

/// Checks the datagrams for one node.
#[derive(Debug)]
pub struct DatagramReceiver {
    name: NodeName,
    boot: u64,
    windows: BTreeMap<NodeName, ReplayWindow>,
    /// Number of datagrams that passed all checks.
    received: u64,
}

/// The counters that a receiver has seen of one sender.
#[derive(Debug, Clone, Copy)]
struct ReplayWindow {
    boot: u64,
    highest: u64,
    /// Bit n is set if the counter `highest - n` was received.
    seen: u64,
    /// Value of [`DatagramReceiver::received`] at the last datagram.
    last_use: u64,
}

/// The fields of a datagram whose code was not checked.
struct UncheckedDatagram<'a> {
    boot: u64,
    receiver_boot: u64,
    counter: u64,
    sender: NodeName,
    frame: DatagramFrame,
    covered: &'a [u8],
    code: &'a [u8],
}

impl DatagramReceiver {
    /// Returns the receiver of the node `name` whose daemon has the start number `boot`.
    pub fn new(name: NodeName, boot: u64) -> DatagramReceiver {
        DatagramReceiver {
            name,
            boot,
            windows: BTreeMap::new(),
            received: 0,
        }
    }

    /// Checks a datagram, and that this node has not received it before. `keys_of` returns the keys that this node has
    /// agreed on with another one.
    ///
    /// # Errors
    /// The datagram is refused.
    pub fn open(
        &mut self,
        keys_of: impl FnOnce(&NodeName) -> Option<PairKeys>,
        bytes: &[u8],
    ) -> Result<OpenedDatagram, DatagramError> {
        let datagram = UncheckedDatagram::parse(bytes).ok_or(DatagramError::Malformed)?;
        let keys = keys_of(&datagram.sender).ok_or(DatagramError::UnknownSender)?;
        if (datagram.boot, datagram.receiver_boot) != (keys.boot, self.boot) {
            return Err(DatagramError::Stale);
        }
        let code = authentication_code(&keys.inbound, &self.name, datagram.covered);
        code.verify_slice(datagram.code)
            .map_err(|_| DatagramError::Forged)?;
        self.admit(&datagram)?;
        Ok(OpenedDatagram {
            sender: datagram.sender,
            frame: datagram.frame,
        })
    }

    /// Notes the counter of an authentic datagram.
    fn admit(&mut self, datagram: &UncheckedDatagram<'_>) -> Result<(), DatagramError> {
        let (boot, counter) = (datagram.boot, datagram.counter);
        let known = self.windows.get(&datagram.sender).copied();
        let mut window = match known {
            Some(window) if window.boot == boot => window,
            _ => ReplayWindow {
                boot,
                highest: 0,
                seen: 0,
                last_use: 0,
            },
        };
        if !window.admit(counter) {
            return Err(DatagramError::Replayed);
        }
        self.received += 1;
        window.last_use = self.received;
        if known.is_none() && self.windows.len() >= SENDERS_MAX {
            let oldest = self
                .windows
                .iter()
                .min_by_key(|(_, window)| window.last_use);
            if let Some(name) = oldest.map(|(name, _)| name.clone()) {
                self.windows.remove(&name);
            }
        }
        self.windows.insert(datagram.sender.clone(), window);
        Ok(())
    }
}

impl ReplayWindow {
    /// Notes a counter; returns false if it was received before, or is behind the window.
    fn admit(&mut self, counter: u64) -> bool {
        if counter > self.highest {
            let shift = counter - self.highest;
            self.seen = if shift < WINDOW {
                self.seen << shift
            } else {
                0
            } | 1;
            self.highest = counter;
            return true;
        }
        let behind = self.highest - counter;
        let is_new = behind < WINDOW && self.seen & 1 << behind == 0;
        if is_new {
            self.seen |= 1 << behind;
        }
        is_new
    }
}

impl UncheckedDatagram<'_> {
    fn parse(bytes: &[u8]) -> Option<UncheckedDatagram<'_>> {
        if bytes.len() > DATAGRAM_BYTES_MAX {
            return None;
        }
        let (covered, code) = bytes.split_at_checked(bytes.len().checked_sub(CODE_BYTES)?)?;
        let (magic, rest) = covered.split_first_chunk::<2>()?;
        let ([version], rest) = rest.split_first_chunk::<1>()?;
        let (boot, rest) = rest.split_first_chunk::<8>()?;
        let (receiver_boot, rest) = rest.split_first_chunk::<8>()?;
        let (counter, rest) = rest.split_first_chunk::<8>()?;
        let ([name_length], rest) = rest.split_first_chunk::<1>()?;
        let (name, content) = rest.split_at_checked(usize::from(*name_length))?;
        if *magic != MAGIC || *version != VERSION || name.len() > NODE_NAME_BYTES_MAX {
            return None;
        }
        let sender = std::str::from_utf8(name).ok()?.parse().ok()?;
        let (frame, excess) = postcard::take_from_bytes(content).ok()?;
        excess.is_empty().then_some(UncheckedDatagram {
            boot: u64::from_be_bytes(*boot),
            receiver_boot: u64::from_be_bytes(*receiver_boot),
            counter: u64::from_be_bytes(*counter),
            sender,
            frame,
            covered,
            code,
        })
    }
}

fn authentication_code(
    key: &DatagramAuthenticationKey,
    receiver: &NodeName,
    covered: &[u8],
) -> Hmac<Sha256> {
    // HMAC pads a short key with zeros.
    let mut block = [0; 64];
    block[..DATAGRAM_KEY_BYTES].copy_from_slice(&key.0);
    let mut code = Hmac::<Sha256>::new(&block.into());
    let receiver = receiver.as_str().as_bytes();
    code.update(LABEL);
    code.update(&[receiver.len() as u8]);
    code.update(receiver);
    code.update(covered);
    code
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::membership_frames::ServerListVersion;
    use proptest::prelude::*;

    const KEYS: PairKeys = PairKeys {
        boot: 1,
        inbound: DatagramAuthenticationKey([7; 32]),
        outbound: None,
    };
    /// Start number of the receiver.
    const OWN_BOOT: u64 = 9;

    fn receiver() -> DatagramReceiver {
        DatagramReceiver::new(name("b"), OWN_BOOT)
    }

    /// Returns a datagram of `sender` for the receiver, under the inbound key of these keys.
    fn seal(sender: &str, keys: &PairKeys, frame: &DatagramFrame) -> Vec<u8> {
        let mut sender = DatagramSender::new(name(sender), keys.boot);
        sender.seal(&name("b"), OWN_BOOT, &keys.inbound, frame)
    }

    fn name(text: &str) -> NodeName {
        text.parse().unwrap()
    }

    fn heartbeat(sequence: u64) -> DatagramFrame {
        DatagramFrame::Heartbeat(Heartbeat {
            epoch: 5,
            boot: 6,
            sequence,
            has_lease: true,
            server_list: ServerListVersion::default(),
        })
    }

    fn any_frame() -> impl Strategy<Value = DatagramFrame> {
        let grant = (any::<u64>(), any::<u64>(), any::<u64>(), any::<u64>());
        let grant = grant.prop_map(|(epoch, boot, sequence, join)| DatagramFrame::LeaseGrant {
            epoch,
            boot,
            sequence,
            join: JoinNumber(join),
        });
        prop_oneof![any::<u64>().prop_map(heartbeat), grant]
    }

    proptest! {
        #[test]
        fn sealed_datagram_opens_once_at_its_receiver(
            frame in any_frame(), secret: [u8; 32], boot: u64, sender in "[a-z]{1,40}"
        ) {
            let keys = PairKeys { boot, inbound: DatagramAuthenticationKey(secret), outbound: None };
            let bytes = seal(&sender, &keys, &frame);
            let keys_of = |named: &NodeName| (named.as_str() == sender).then_some(keys);
            let mut receiver = receiver();
            let expected = OpenedDatagram { sender: name(&sender), frame };
            prop_assert_eq!(receiver.open(keys_of, &bytes), Ok(expected));
            prop_assert_eq!(receiver.open(keys_of, &bytes), Err(DatagramError::Replayed));
            prop_assert_eq!(receiver.open(|_| None, &bytes), Err(DatagramError::UnknownSender));
            let mut other = DatagramReceiver::new(name("c"), OWN_BOOT);
            prop_assert_eq!(other.open(keys_of, &bytes), Err(DatagramError::Forged));
        }

        #[test]
        fn datagram_under_the_key_of_another_sender_is_refused(
            frame in any_frame(), secrets: [[u8; 32]; 2]
        ) {
            prop_assume!(secrets[0] != secrets[1]);
            let keys = |secret| PairKeys { inbound: DatagramAuthenticationKey(secret), ..KEYS };
            let [own, other] = secrets.map(keys);
            let bytes = seal("a", &own, &frame);
            let opened = receiver().open(|_| Some(other), &bytes);
            prop_assert_eq!(opened, Err(DatagramError::Forged));
        }

        #[test]
        fn modified_datagram_is_refused(frame in any_frame(), at: prop::sample::Index, bit in 0..8_u8) {
            let mut bytes = seal("a", &KEYS, &frame);
            let at = at.index(bytes.len());
            bytes[at] ^= 1_u8 << bit;
            prop_assert!(receiver().open(|_| Some(KEYS), &bytes).is_err());
        }

        #[test]
        fn any_bytes_are_parsed_without_panic(bytes: Vec<u8>) {
            prop_assert!(receiver().open(|_| Some(KEYS), &bytes).is_err());
        }

        #[test]
        fn counter_is_admitted_once_and_only_within_the_window(
            counters in prop::collection::vec(0..200_u64, 1..100)
        ) {
            let mut window = ReplayWindow { boot: 1, highest: 0, seen: 0, last_use: 0 };
            let mut admitted = std::collections::BTreeSet::new();
            for counter in counters {
                let is_late = counter + WINDOW <= window.highest;
                let expected = !is_late && !admitted.contains(&counter);
                prop_assert_eq!(window.admit(counter), expected, "{}", counter);
                admitted.insert(counter);
            }
        }
    }

    #[test]
    fn datagram_of_another_life_of_either_daemon_is_stale() {
        let bytes = seal("a", &KEYS, &heartbeat(1));
        // The receiver has restarted, and must not believe a record of its former life even under the same key.
        let mut restarted = DatagramReceiver::new(name("b"), OWN_BOOT + 1);
        let stale = Err(DatagramError::Stale);
        assert_eq!(restarted.open(|_| Some(KEYS), &bytes), stale);
        let mut receiver = receiver();
        receiver.open(|_| Some(KEYS), &bytes).unwrap();
        // The sender has restarted, and counts from one again.
        let keys = PairKeys {
            boot: 2,
            inbound: DatagramAuthenticationKey([8; 32]),
            outbound: None,
        };
        assert_eq!(receiver.open(|_| Some(keys), &bytes), stale);
        let bytes = seal("a", &keys, &heartbeat(1));
        receiver.open(|_| Some(keys), &bytes).unwrap();
    }

    #[test]
    fn memory_for_senders_is_bounded() {
        let mut receiver = receiver();
        for sender in 0..SENDERS_MAX + 10 {
            let bytes = seal(&format!("n{sender}"), &KEYS, &heartbeat(1));
            receiver.open(|_| Some(KEYS), &bytes).unwrap();
        }
        assert_eq!(receiver.windows.len(), SENDERS_MAX);
    }

    #[test]
    fn key_does_not_show_in_logs() {
        let shown = format!("{KEYS:?}");
        assert!(!shown.contains("7"), "{shown}");
    }

    #[test]
    fn votes_do_not_travel_in_datagrams() {
        let frame = MembershipFrame::ViewRequest { epoch: 1 };
        assert_eq!(DatagramFrame::of(&frame), None);
        let frame = MembershipFrame::from(heartbeat(1));
        assert_eq!(DatagramFrame::of(&frame), Some(heartbeat(1)));
    }
}
