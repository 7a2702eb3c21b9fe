//! Whole conversations of a compromised donor, with the acceptor's checks: the order of messages, the parsers, the
//! judge, and the limits of memory writes. Accepted messages must stay within an ordinary user's rights, as
//! [`ordinary`] states them independently of the judge.

mod ordinary;
mod spoil;

use holdfast_sys::process::image::{
    Checked, Descriptors, Frozen, Mapping, Missing, Pages, PagesIn, Space, Tree, decode, encode,
};
use holdfast_sys::process::judge::{Allowed, Conversation, Here, Judge, Message};
use std::collections::BTreeSet;

/// The accepted user, its group, the directory of its programs, and its permitted privileged port.
const USER: u32 = 1000;
const GROUP: u32 = 100;
const PROGRAMS: &str = "/usr/games";
const PORT: u16 = 443;

/// Messages, indexed by the number that represents them in an input.
const MESSAGES: [Message; 15] = [
    Message::Tree,
    Message::Descriptors,
    Message::Outlook,
    Message::Pages,
    Message::Seen,
    Message::Freezing,
    Message::Missing,
    Message::LastDescriptors,
    Message::Sockets,
    Message::LastSockets,
    Message::Frozen,
    Message::Digest,
    Message::Follows,
    Message::Lost,
    Message::Locks,
];
/// Flag of a record that contains its message as bytes.
const RAW: u8 = 0x80;

/// Processes records. A record begins with a byte that selects the message. With [`RAW`] the message's length in two
/// bytes and its bytes follow. Otherwise the number of changes to a sound message follows, in one byte, and two bytes
/// per change: field and value. Returns true if the conversation is complete, so that the process could run.
pub fn run(data: &[u8]) -> bool {
    let mut acceptor = Acceptor::new();
    let mut rest = data;
    while let [what, after @ ..] = rest {
        let message = MESSAGES[usize::from(what & !RAW) % MESSAGES.len()];
        let (body, others) = match what & RAW {
            0 => changed(message, after),
            _ => raw(after),
        };
        // A donor is not heard after its first violation.
        if acceptor.take(message, &body).is_err() {
            return false;
        }
        rest = others;
    }
    acceptor.order.is_complete()
}

/// Builds a record of a message with changes, each of a field to a value.
pub fn record(message: Message, changes: &[(u8, u8)]) -> Vec<u8> {
    let number = MESSAGES.iter().position(|of| *of == message);
    let mut record = vec![number.unwrap_or(0) as u8, changes.len() as u8];
    record.extend(changes.iter().flat_map(|(field, value)| [*field, *value]));
    record
}

/// Returns conversations in valid order; the acceptor accepts the complete ones.
pub fn examples() -> Vec<(&'static str, Vec<u8>)> {
    use Message::{
        Descriptors, Digest, Freezing, Frozen, LastDescriptors, LastSockets, Missing, Outlook,
        Pages, Seen, Sockets, Tree,
    };
    let of = |messages: &[Message]| -> Vec<u8> {
        messages.iter().flat_map(|of| record(*of, &[])).collect()
    };
    let first = [Tree, Descriptors, Outlook, Pages];
    let last = [Freezing, LastDescriptors, LastSockets, Frozen];
    let rounds = [
        Seen,
        Tree,
        Pages,
        Descriptors,
        Freezing,
        Tree,
        Pages,
        Missing,
    ];
    let rest = [Sockets, LastSockets, Frozen, Digest];
    vec![
        ("short", of(&[&first[..], &last].concat())),
        (
            "long",
            of(&[&first[..], &rounds, &[LastDescriptors], &rest].concat()),
        ),
        ("first-round", of(&first)),
    ]
}

fn raw(bytes: &[u8]) -> (Vec<u8>, &[u8]) {
    let [high, low, rest @ ..] = bytes else {
        return (Vec::new(), &[]);
    };
    let length = usize::from(u16::from_be_bytes([*high, *low])).min(rest.len());
    let (body, rest) = rest.split_at(length);
    (body.to_vec(), rest)
}

fn changed(message: Message, bytes: &[u8]) -> (Vec<u8>, &[u8]) {
    let Some((count, rest)) = bytes.split_first() else {
        return (sound(message, &[]), &[]);
    };
    let length = (usize::from(*count) * 2).min(rest.len() & !1);
    let (changes, rest) = rest.split_at(length);
    (sound(message, changes), rest)
}

/// Returns a message as an honest donor sends it, after these changes.
fn sound(message: Message, changes: &[u8]) -> Vec<u8> {
    let changes = changes.chunks_exact(2).map(|pair| (pair[0], pair[1]));
    match message {
        Message::Tree => spoil::tree(changes),
        Message::Descriptors => spoil::descriptors(changes),
        Message::Outlook | Message::Frozen => spoil::frozen(changes),
        Message::Pages => spoil::pages(changes),
        Message::Missing => spoil::missing(),
        _ => Vec::new(),
    }
}

/// State of an acceptor for one arriving process.
struct Acceptor {
    order: Conversation,
    judge: Judge,
    /// Accepted messages.
    taken: Vec<Message>,
    tree: Option<Tree>,
}

impl Acceptor {
    fn new() -> Acceptor {
        let allowed = Allowed {
            users: [USER].into(),
            groups: [GROUP].into(),
            programs: vec![PROGRAMS.into()],
            ports: [PORT].into(),
        };
        Acceptor {
            order: Conversation::default(),
            judge: Judge::new(allowed, Here::default()),
            taken: Vec::new(),
            tree: None,
        }
    }

    /// Accepts a message as the daemon does: first its order, then its form, then the judge.
    fn take(&mut self, message: Message, body: &[u8]) -> Result<(), String> {
        self.order.take(message)?;
        match message {
            Message::Tree => {
                let tree: Tree = read(body)?;
                self.judge.tree(&tree)?;
                ordinary::tree(&tree);
                self.tree = Some(tree);
            }
            Message::Descriptors => {
                let found: Descriptors = read(body)?;
                self.judge.descriptors(&found)?;
                ordinary::descriptors(&found);
            }
            Message::Outlook | Message::Frozen => {
                let frozen: Frozen = read(body)?;
                self.judge.frozen(&frozen)?;
                ordinary::frozen(&frozen);
            }
            Message::Pages => self.pages(body)?,
            Message::Missing => drop(read::<Missing>(body)?),
            // Messages that need a daemon's knowledge, such as socket states and checksums, are not checked here.
            Message::Seen
            | Message::Freezing
            | Message::LastDescriptors
            | Message::Sockets
            | Message::LastSockets
            | Message::Digest
            | Message::Locks
            | Message::Follows
            | Message::Lost => {}
        }
        self.taken.push(message);
        self.keeps_order();
        Ok(())
    }

    fn pages(&self, body: &[u8]) -> Result<(), String> {
        let pages = PagesIn::read(body).map_err(|error| error.to_string())?;
        let tree = self.tree.as_ref().ok_or("memory of nobody")?;
        for run in &pages.runs {
            if let Space::Process(index) = run.space {
                let process = tree.processes.get(index as usize);
                let mappings = process.map_or(&[][..], |process| &process.mappings);
                if !Mapping::cover(mappings, run) {
                    return Err("pages outside the mappings of their process".to_owned());
                }
                ordinary::memory(mappings, run);
            }
        }
        Ok(())
    }

    /// Asserts that the accepted messages describe one process, once, and that the process was judged before its memory
    /// was written.
    fn keeps_order(&self) {
        let at = |message| self.taken.iter().position(|of| *of == message);
        let count = |message| self.taken.iter().filter(|of| **of == message).count();
        assert_eq!(self.taken[0], Message::Tree);
        for once in [
            Message::Outlook,
            Message::LastDescriptors,
            Message::LastSockets,
            Message::Frozen,
            Message::Digest,
            Message::Locks,
        ] {
            assert!(count(once) <= 1, "{once:?} came twice");
        }
        let orders = [
            (Message::Descriptors, Message::Outlook),
            (Message::Outlook, Message::Pages),
            (Message::Freezing, Message::Missing),
            (Message::Freezing, Message::LastDescriptors),
            (Message::LastDescriptors, Message::Sockets),
            (Message::LastDescriptors, Message::LastSockets),
            (Message::LastSockets, Message::Frozen),
            (Message::Frozen, Message::Digest),
            (Message::Frozen, Message::Locks),
        ];
        for (first, second) in orders {
            let kept = at(second).is_none_or(|second| at(first).is_some_and(|at| at < second));
            assert!(kept, "{second:?} before {first:?}");
        }
        if let Some(last) = at(Message::LastDescriptors) {
            let rest: BTreeSet<u8> = self.taken[last + 1..].iter().map(|of| *of as u8).collect();
            let may = [
                Message::Sockets,
                Message::LastSockets,
                Message::Frozen,
                Message::Digest,
                Message::Locks,
            ];
            assert!(
                rest.iter()
                    .all(|of| may.iter().any(|may| *may as u8 == *of))
            );
        }
        for never in [Message::Follows, Message::Lost] {
            assert_eq!(count(never), 0, "memory follows what does not run");
        }
        assert_eq!(self.order.is_complete(), at(Message::Frozen).is_some());
    }
}

fn read<T: Checked>(body: &[u8]) -> Result<T, String> {
    decode(body).map_err(|error| error.to_string())
}

/// Returns a message's bytes; none if no donor could send the message.
fn bytes<T: Checked>(message: &T) -> Vec<u8> {
    encode(message).unwrap_or_default()
}

fn pages_bytes(pages: Pages) -> Vec<u8> {
    let parts = pages.into_message();
    parts.map_or_else(|_| Vec::new(), |(front, content)| [front, content].concat())
}
