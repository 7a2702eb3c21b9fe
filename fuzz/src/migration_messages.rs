//! Whole conversations of a compromised donor, with the acceptor's checks: the order of messages, the parsers, the
//! judge, and the limits of memory writes. Accepted messages must stay within an ordinary user's rights, as
//! [`user_rights`] states them independently of the judge.

mod mutated_messages;
mod user_rights;

use holdfast_checkpoint::image::{
    BorrowedPages, DescriptorUpdate, MemoryMapping, MemorySpace, MissingPages, PagesMessage,
    ProcessTreeState, TreeLayout, Validate, decode, encode,
};
use holdfast_checkpoint::image_judge::{
    DonorMessageKind, ImageJudge, ImagePolicy, MessageSequence, NodeLimits,
};
use std::collections::BTreeSet;

/// The accepted user, its group, the directory of its programs, and its permitted privileged port.
const USER: u32 = 1000;
const GROUP: u32 = 100;
const PROGRAMS: &str = "/usr/games";
const PORT: u16 = 443;

/// Messages, indexed by the number that represents them in an input.
const MESSAGES: [DonorMessageKind; 15] = [
    DonorMessageKind::Tree,
    DonorMessageKind::Descriptors,
    DonorMessageKind::StatePreview,
    DonorMessageKind::Pages,
    DonorMessageKind::TcpSnapshots,
    DonorMessageKind::FreezeStart,
    DonorMessageKind::MissingPages,
    DonorMessageKind::LastDescriptors,
    DonorMessageKind::Sockets,
    DonorMessageKind::LastSockets,
    DonorMessageKind::State,
    DonorMessageKind::Digest,
    DonorMessageKind::PostcopyPages,
    DonorMessageKind::PostcopyLost,
    DonorMessageKind::Locks,
];
/// Flag of a record that contains its message as bytes.
const RAW: u8 = 0x80;

/// Processes records. A record begins with a byte that selects the message. With [`RAW`] the message's length in two
/// bytes and its bytes follow. Otherwise the number of changes to a sound message follows, in one byte, and two bytes
/// per change: field and value. Returns true if the conversation is complete, so that the process could run.
pub fn run(data: &[u8]) -> bool {
    let mut acceptor = Acceptor::new();
    let mut rest = data;
    while let [selector, after @ ..] = rest {
        let message = MESSAGES[usize::from(selector & !RAW) % MESSAGES.len()];
        let (body, rest_of_records) = match selector & RAW {
            0 => split_changed(message, after),
            _ => split_raw(after),
        };
        // A donor is not heard after its first violation.
        if acceptor.accept(message, &body).is_err() {
            return false;
        }
        rest = rest_of_records;
    }
    acceptor.order.is_complete()
}

/// Builds a record of a message with changes, each of a field to a value.
pub fn record(message: DonorMessageKind, changes: &[(u8, u8)]) -> Vec<u8> {
    let number = MESSAGES.iter().position(|of| *of == message);
    let mut record = vec![number.unwrap_or(0) as u8, changes.len() as u8];
    record.extend(changes.iter().flat_map(|(field, value)| [*field, *value]));
    record
}

/// Returns conversations in valid order; the acceptor accepts the complete ones.
pub fn examples() -> Vec<(&'static str, Vec<u8>)> {
    use DonorMessageKind::{
        Descriptors, Digest, FreezeStart, LastDescriptors, LastSockets, MissingPages, Pages,
        Sockets, State, StatePreview, TcpSnapshots, Tree,
    };
    let records_of = |messages: &[DonorMessageKind]| -> Vec<u8> {
        messages.iter().flat_map(|of| record(*of, &[])).collect()
    };
    let first_messages = [Tree, Descriptors, StatePreview, Pages];
    let freeze_messages = [FreezeStart, LastDescriptors, LastSockets, State];
    let rounds = [
        TcpSnapshots,
        Tree,
        Pages,
        Descriptors,
        FreezeStart,
        Tree,
        Pages,
        MissingPages,
    ];
    let unordered_messages = [Sockets, LastSockets, State, Digest];
    vec![
        (
            "short",
            records_of(&[&first_messages[..], &freeze_messages].concat()),
        ),
        (
            "long",
            records_of(
                &[
                    &first_messages[..],
                    &rounds,
                    &[LastDescriptors],
                    &unordered_messages,
                ]
                .concat(),
            ),
        ),
        ("first-round", records_of(&first_messages)),
    ]
}

fn split_raw(bytes: &[u8]) -> (Vec<u8>, &[u8]) {
    let [high, low, rest @ ..] = bytes else {
        return (Vec::new(), &[]);
    };
    let length = usize::from(u16::from_be_bytes([*high, *low])).min(rest.len());
    let (body, rest) = rest.split_at(length);
    (body.to_vec(), rest)
}

fn split_changed(message: DonorMessageKind, bytes: &[u8]) -> (Vec<u8>, &[u8]) {
    let Some((count, rest)) = bytes.split_first() else {
        return (sound_message(message, &[]), &[]);
    };
    let length = (usize::from(*count) * 2).min(rest.len() & !1);
    let (changes, rest) = rest.split_at(length);
    (sound_message(message, changes), rest)
}

/// Returns a message as an honest donor sends it, after these changes.
fn sound_message(message: DonorMessageKind, changes: &[u8]) -> Vec<u8> {
    let changes = changes.chunks_exact(2).map(|pair| (pair[0], pair[1]));
    match message {
        DonorMessageKind::Tree => mutated_messages::tree_message(changes),
        DonorMessageKind::Descriptors => mutated_messages::descriptors_message(changes),
        DonorMessageKind::StatePreview | DonorMessageKind::State => {
            mutated_messages::frozen_message(changes)
        }
        DonorMessageKind::Pages => mutated_messages::pages_message(changes),
        DonorMessageKind::MissingPages => mutated_messages::missing_message(),
        _ => Vec::new(),
    }
}

/// State of an acceptor for one arriving process.
struct Acceptor {
    order: MessageSequence,
    judge: ImageJudge,
    /// Accepted messages.
    accepted: Vec<DonorMessageKind>,
    tree: Option<TreeLayout>,
}

impl Acceptor {
    fn new() -> Acceptor {
        let allowed = ImagePolicy {
            users: [USER].into(),
            groups: [GROUP].into(),
            programs: vec![PROGRAMS.into()],
            ports: [PORT].into(),
        };
        Acceptor {
            order: MessageSequence::default(),
            judge: ImageJudge::new(allowed, NodeLimits::default()),
            accepted: Vec::new(),
            tree: None,
        }
    }

    /// Accepts a message as the daemon does: first its order, then its form, then the judge.
    fn accept(&mut self, message: DonorMessageKind, body: &[u8]) -> Result<(), String> {
        self.order.accept(message)?;
        match message {
            DonorMessageKind::Tree => {
                let tree: TreeLayout = decode_message(body)?;
                self.judge.check_tree(&tree)?;
                user_rights::assert_tree(&tree);
                self.tree = Some(tree);
            }
            DonorMessageKind::Descriptors => {
                let found: DescriptorUpdate = decode_message(body)?;
                self.judge.check_descriptors(&found)?;
                user_rights::assert_descriptors(&found);
            }
            DonorMessageKind::StatePreview | DonorMessageKind::State => {
                let frozen: ProcessTreeState = decode_message(body)?;
                self.judge.check_state(&frozen)?;
                user_rights::assert_frozen(&frozen);
            }
            DonorMessageKind::Pages => self.accept_pages(body)?,
            DonorMessageKind::MissingPages => drop(decode_message::<MissingPages>(body)?),
            // Messages that need a daemon's knowledge, such as socket states and checksums, are not checked here.
            DonorMessageKind::TcpSnapshots
            | DonorMessageKind::FreezeStart
            | DonorMessageKind::LastDescriptors
            | DonorMessageKind::Sockets
            | DonorMessageKind::LastSockets
            | DonorMessageKind::Digest
            | DonorMessageKind::Locks
            | DonorMessageKind::PostcopyPages
            | DonorMessageKind::PostcopyLost => {}
        }
        self.accepted.push(message);
        self.assert_order();
        Ok(())
    }

    fn accept_pages(&self, body: &[u8]) -> Result<(), String> {
        let pages = BorrowedPages::decode(body).map_err(|error| error.to_string())?;
        let tree = self.tree.as_ref().ok_or("memory of nobody")?;
        for run in &pages.runs {
            if let MemorySpace::Process(index) = run.space {
                let process = tree.processes.get(index as usize);
                let mappings = process.map_or(&[][..], |process| &process.mappings);
                if !MemoryMapping::covers(mappings, run) {
                    return Err("pages outside the mappings of their process".to_owned());
                }
                user_rights::assert_memory(mappings, run);
            }
        }
        Ok(())
    }

    /// Asserts that the accepted messages describe one process, once, and that the process was judged before its memory
    /// was written.
    fn assert_order(&self) {
        let position_of = |message| self.accepted.iter().position(|of| *of == message);
        let count = |message| self.accepted.iter().filter(|of| **of == message).count();
        assert_eq!(self.accepted[0], DonorMessageKind::Tree);
        for unique_message in [
            DonorMessageKind::StatePreview,
            DonorMessageKind::LastDescriptors,
            DonorMessageKind::LastSockets,
            DonorMessageKind::State,
            DonorMessageKind::Digest,
            DonorMessageKind::Locks,
        ] {
            assert!(count(unique_message) <= 1, "{unique_message:?} came twice");
        }
        let orders = [
            (
                DonorMessageKind::Descriptors,
                DonorMessageKind::StatePreview,
            ),
            (DonorMessageKind::StatePreview, DonorMessageKind::Pages),
            (
                DonorMessageKind::FreezeStart,
                DonorMessageKind::MissingPages,
            ),
            (
                DonorMessageKind::FreezeStart,
                DonorMessageKind::LastDescriptors,
            ),
            (DonorMessageKind::LastDescriptors, DonorMessageKind::Sockets),
            (
                DonorMessageKind::LastDescriptors,
                DonorMessageKind::LastSockets,
            ),
            (DonorMessageKind::LastSockets, DonorMessageKind::State),
            (DonorMessageKind::State, DonorMessageKind::Digest),
            (DonorMessageKind::State, DonorMessageKind::Locks),
        ];
        for (first, second) in orders {
            let is_ordered = position_of(second)
                .is_none_or(|second| position_of(first).is_some_and(|at| at < second));
            assert!(is_ordered, "{second:?} before {first:?}");
        }
        if let Some(last) = position_of(DonorMessageKind::LastDescriptors) {
            let later_messages: BTreeSet<u8> = self.accepted[last + 1..]
                .iter()
                .map(|of| *of as u8)
                .collect();
            let allowed_messages = [
                DonorMessageKind::Sockets,
                DonorMessageKind::LastSockets,
                DonorMessageKind::State,
                DonorMessageKind::Digest,
                DonorMessageKind::Locks,
            ];
            assert!(
                later_messages
                    .iter()
                    .all(|of| allowed_messages.iter().any(|may| *may as u8 == *of))
            );
        }
        for forbidden_message in [
            DonorMessageKind::PostcopyPages,
            DonorMessageKind::PostcopyLost,
        ] {
            assert_eq!(
                count(forbidden_message),
                0,
                "memory follows what does not run"
            );
        }
        assert_eq!(
            self.order.is_complete(),
            position_of(DonorMessageKind::State).is_some()
        );
    }
}

fn decode_message<T: Validate>(body: &[u8]) -> Result<T, String> {
    decode(body).map_err(|error| error.to_string())
}

/// Returns a message's bytes; none if no donor could send the message.
fn encode_message<T: Validate>(message: &T) -> Vec<u8> {
    encode(message).unwrap_or_default()
}

fn encode_pages(pages: PagesMessage) -> Vec<u8> {
    let parts = pages.into_message();
    parts.map_or_else(|_| Vec::new(), |(front, content)| [front, content].concat())
}
