//! Order and number of the messages that a donor may send.
//!
//! A donor sends rounds while its process runs (shape, memory, descriptors, observed states of connections); the first
//! round has an outlook on the state before any memory. Then the donor announces the freeze, and sends the rest once:
//! last descriptors, states of sockets, state, checksums if requested, and an answer about locks if asked.
//! [`Conversation`] checks each message before it takes effect, and refuses messages that a donor of this release never
//! sends.
//!
//! A new kind of message is added to [`Message`]; [`Conversation::take`] then does not compile until the place of the
//! message is defined.

/// Most shapes of a tree. A freeze that is attempted repeatedly sends one shape every millisecond for 300 ms.
const TREES_MAX: u32 = 1 << 16;
/// Most messages with observed states of connections.
const SEEN_MAX: u32 = 1 << 18;
/// Most announcements of a freeze: one for each attempt.
const FREEZES_MAX: u32 = 1 << 12;
/// Most messages with states of sockets: one for each socket, if sockets move one by one.
const SOCKETS_MAX: u32 = 1 << 20;

/// Kind of a donor's message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Message {
    /// The tree's shape.
    Tree,
    /// Memory pages.
    Pages,
    /// Addresses of memory that is sent after the process resumes (post-copy).
    Missing,
    /// Descriptors of the running tree.
    Descriptors,
    /// State of processes and threads, as far as it is known while they run.
    Outlook,
    /// States of connections, observed while the tree runs.
    Seen,
    /// Announcement that the tree is about to be stopped.
    Freezing,
    /// Descriptors of the stopped tree.
    LastDescriptors,
    /// States of some sockets of the stopped tree.
    Sockets,
    /// States of the remaining sockets.
    LastSockets,
    /// State of processes and threads.
    Frozen,
    /// Checksums of the tree.
    Digest,
    /// The donor's answer to the request to share its exclusive locks.
    Locks,
    /// Memory that is sent after the process resumes (post-copy).
    Follows,
    /// The donor has lost memory that was still to be sent.
    Lost,
}

/// Progress of a conversation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    /// No message was received.
    #[default]
    New,
    /// Rounds are being received.
    Copying,
    /// The last descriptors were received.
    Stopped,
    /// The states of all sockets were received.
    Sockets,
    /// The state was received: the process can run.
    Complete,
    /// Checksums were received.
    Compared,
}

/// Messages of one move that a donor has sent so far.
#[derive(Clone, Debug, Default)]
pub struct Conversation {
    phase: Phase,
    trees: u32,
    seen: u32,
    freezes: u32,
    sockets: u32,
    /// True if descriptors of any round were received.
    has_descriptors: bool,
    /// True if descriptors were received since the last shape.
    described: bool,
    /// True if missing memory was named since the last shape.
    named: bool,
    /// True if an outlook was received.
    outlook: bool,
    /// True if the donor has answered about locks.
    shared: bool,
}

impl Conversation {
    /// Checks the next message, and counts it.
    ///
    /// # Errors
    /// Reason why the message is not allowed at this point. The move must be refused: all later messages are invalid
    /// too.
    pub fn take(&mut self, message: Message) -> Result<(), String> {
        let refused = |why: &str| Err(format!("the donor's message {message:?} {why}"));
        let in_order = match message {
            Message::Tree => self.phase <= Phase::Copying,
            Message::Pages => self.phase == Phase::Copying && self.outlook,
            Message::Descriptors => self.phase == Phase::Copying,
            Message::Seen | Message::Outlook => {
                self.phase == Phase::Copying && self.has_descriptors
            }
            Message::Freezing => self.phase == Phase::Copying && self.has_descriptors,
            Message::Missing => self.phase == Phase::Copying && self.freezes > 0,
            Message::LastDescriptors => self.phase == Phase::Copying && self.freezes > 0,
            Message::Sockets | Message::LastSockets => self.phase == Phase::Stopped,
            Message::Frozen => self.phase == Phase::Sockets,
            Message::Digest => self.phase == Phase::Complete,
            Message::Locks => self.phase >= Phase::Complete,
            Message::Follows | Message::Lost => false,
        };
        if !in_order {
            return refused("is out of order");
        }
        let counted = |count: &mut u32| {
            *count += 1;
            *count
        };
        let too_many = match message {
            Message::Tree => counted(&mut self.trees) > TREES_MAX,
            Message::Seen => counted(&mut self.seen) > SEEN_MAX,
            Message::Freezing => counted(&mut self.freezes) > FREEZES_MAX,
            Message::Sockets => counted(&mut self.sockets) > SOCKETS_MAX,
            Message::Descriptors => std::mem::replace(&mut self.described, true),
            Message::Outlook => std::mem::replace(&mut self.outlook, true),
            Message::Missing => std::mem::replace(&mut self.named, true),
            Message::Locks => std::mem::replace(&mut self.shared, true),
            // Messages that are bounded by their phases, or by the memory that they fill.
            Message::Pages
            | Message::LastDescriptors
            | Message::LastSockets
            | Message::Frozen
            | Message::Digest
            | Message::Follows
            | Message::Lost => false,
        };
        if too_many {
            return refused("came too often");
        }
        match message {
            Message::Tree => {
                self.phase = Phase::Copying;
                (self.described, self.named) = (false, false);
            }
            Message::Descriptors => self.has_descriptors = true,
            Message::LastDescriptors => self.phase = Phase::Stopped,
            Message::LastSockets => self.phase = Phase::Sockets,
            Message::Frozen => self.phase = Phase::Complete,
            Message::Digest => self.phase = Phase::Compared,
            Message::Pages
            | Message::Missing
            | Message::Seen
            | Message::Outlook
            | Message::Freezing
            | Message::Sockets
            | Message::Locks
            | Message::Follows
            | Message::Lost => {}
        }
        Ok(())
    }

    /// Returns true if everything was received that the process needs to run.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.phase >= Phase::Complete
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ALL: [Message; 15] = [
        Message::Tree,
        Message::Pages,
        Message::Missing,
        Message::Descriptors,
        Message::Outlook,
        Message::Seen,
        Message::Freezing,
        Message::LastDescriptors,
        Message::Sockets,
        Message::LastSockets,
        Message::Frozen,
        Message::Digest,
        Message::Locks,
        Message::Follows,
        Message::Lost,
    ];

    fn all(messages: &[Message]) -> Result<Conversation, String> {
        let mut conversation = Conversation::default();
        for message in messages {
            conversation.take(*message)?;
        }
        Ok(conversation)
    }

    #[test]
    fn a_whole_move_is_in_order() {
        use Message::*;
        let whole = [
            Tree,
            Descriptors,
            Outlook,
            Pages,
            Seen,
            Pages,
            Tree,
            Pages,
            Descriptors,
            Seen,
            Freezing,
            Pages,
            Tree,
            Pages,
            Missing,
            Tree,
            Pages,
            Missing,
            LastDescriptors,
            Sockets,
            Sockets,
            LastSockets,
            Frozen,
            Digest,
            Locks,
        ];
        for length in 0..=whole.len() {
            let conversation = all(&whole[..length]).expect("in order");
            assert_eq!(conversation.is_complete(), length >= whole.len() - 2);
        }
    }

    #[test]
    fn what_is_unexpected_twice_out_of_order_or_too_much_is_refused() {
        use Message::*;
        let stopped = [Tree, Descriptors, Freezing, LastDescriptors];
        let complete = [&stopped[..], &[LastSockets, Frozen]].concat();
        let wrong: [&[Message]; 11] = [
            &[Pages],
            &[Tree, Descriptors, Pages],
            &[Tree, Outlook],
            &[Tree, Descriptors, Outlook, Outlook],
            &[Tree, Seen],
            &[Tree, Descriptors, Descriptors],
            &[Tree, Freezing],
            &[Tree, Descriptors, LastDescriptors],
            &[Tree, Descriptors, Freezing, Missing, Missing],
            &[Tree, Descriptors, Freezing, Frozen],
            &[Tree, Follows],
        ];
        for messages in wrong {
            assert!(all(messages).is_err(), "{messages:?}");
        }
        for message in [
            Tree,
            Pages,
            Missing,
            Descriptors,
            Freezing,
            LastDescriptors,
            Frozen,
            Digest,
            Locks,
        ] {
            assert!(
                all(&[&stopped[..], &[message]].concat()).is_err(),
                "{message:?}"
            );
        }
        assert!(all(&[&complete[..], &[Locks, Locks]].concat()).is_err());
        let later = [Digest, Locks];
        for message in ALL.into_iter().filter(|message| !later.contains(message)) {
            assert!(
                all(&[&complete[..], &[message]].concat()).is_err(),
                "{message:?}"
            );
        }
        let mut many = all(&[Tree, Descriptors, Freezing]).expect("in order");
        let taken = (0..2 * FREEZES_MAX).take_while(|_| many.take(Freezing).is_ok());
        assert_eq!(taken.count() as u32, FREEZES_MAX - 1);
    }

    proptest! {
        /// For any messages in any order: the state is accepted once, after descriptors; only checksums and an answer
        /// about locks may follow.
        #[test]
        fn any_conversation_keeps_its_order(choices in proptest::collection::vec(0usize..ALL.len(), 0..200)) {
            let mut conversation = Conversation::default();
            let mut taken = Vec::new();
            for choice in choices {
                if conversation.take(ALL[choice]).is_ok() {
                    taken.push(ALL[choice]);
                }
            }
            let at = |message: Message| taken.iter().position(|one| *one == message);
            let count = |message: Message| taken.iter().filter(|one| **one == message).count();
            for once in [Message::LastDescriptors, Message::LastSockets, Message::Frozen, Message::Digest, Message::Locks] {
                prop_assert!(count(once) <= 1);
            }
            prop_assert!(taken.first().is_none_or(|first| *first == Message::Tree));
            if let Some(frozen) = at(Message::Frozen) {
                prop_assert!(at(Message::LastSockets) < Some(frozen));
                prop_assert!(at(Message::LastDescriptors) < at(Message::LastSockets));
                prop_assert!(taken[frozen + 1..].iter().all(|one| matches!(one, Message::Digest | Message::Locks)));
            }
            prop_assert_eq!(conversation.is_complete(), at(Message::Frozen).is_some());
        }
    }
}
