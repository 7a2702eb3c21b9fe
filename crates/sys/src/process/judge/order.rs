//! The order and number in which messages of a donor may come.
//!
//! A donor sends rounds while its process runs (shape, memory, descriptors, what was seen of connections), the first of which has an
//! outlook on the state before any memory. Then it announces the freeze, and sends the rest once: last descriptors, states of
//! sockets, state, checksums if they were asked for, and an answer about locks if it is asked. [`Conversation`] takes each message
//! before anything is done with it, and refuses what a donor of this release never sends.
//!
//! A new kind of message is added to [`Message`]; [`Conversation::take`] then does not compile until its place is said.

/// Most shapes of a tree. A freeze that is tried again sends one every millisecond for 300 ms.
const TREES_MAX: u32 = 1 << 16;
/// Most messages about connections that were seen, each.
const SEEN_MAX: u32 = 1 << 18;
/// Most announcements of a freeze: one for each time that it is tried.
const FREEZES_MAX: u32 = 1 << 12;
/// Most messages with states of sockets: where sockets move one by one, one each.
const SOCKETS_MAX: u32 = 1 << 20;

/// What a message of a donor is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Message {
    /// The tree's shape.
    Tree,
    /// Memory.
    Pages,
    /// Memory that follows after the process runs.
    Missing,
    /// Descriptors of the running tree.
    Descriptors,
    /// What can be told of the state of processes and threads while they run.
    Outlook,
    /// What was seen of connections while the tree runs.
    Seen,
    /// The tree is about to stand still.
    Freezing,
    /// Descriptors of the stopped tree.
    LastDescriptors,
    /// States of some sockets of the stopped tree.
    Sockets,
    /// States of the remaining sockets.
    LastSockets,
    /// State of processes and threads.
    Frozen,
    /// Checksums.
    Digest,
    /// The donor's answer when it was asked to share its exclusive locks.
    Locks,
    /// Memory that follows, which comes after the process runs.
    Follows,
    /// The donor lost memory that was to follow.
    Lost,
}

/// How far a conversation has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    /// Nothing has come.
    #[default]
    New,
    /// Rounds come.
    Copying,
    /// The last descriptors have come.
    Stopped,
    /// The states of all sockets have come.
    Sockets,
    /// The state has come: the process can run.
    Complete,
    /// Checksums have come.
    Compared,
}

/// What a donor has sent so far, of one move.
#[derive(Clone, Debug, Default)]
pub struct Conversation {
    phase: Phase,
    trees: u32,
    seen: u32,
    freezes: u32,
    sockets: u32,
    /// Descriptors have come, of any round.
    has_descriptors: bool,
    /// Descriptors have come since the last shape.
    described: bool,
    /// Memory that follows was named since the last shape.
    named: bool,
    /// An outlook has come.
    outlook: bool,
    /// The donor has answered about locks.
    shared: bool,
}

impl Conversation {
    /// Takes the next message.
    ///
    /// # Errors
    /// Why the message may not come here. The move is to be refused: whatever comes next is wrong too.
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
            // Bounded by their phases, or by the memory that they fill.
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

    /// Whether all came that the process needs to run.
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
        /// Whatever comes, in any order: state comes once, behind descriptors, and nothing but checksums and an answer about locks comes behind it.
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
