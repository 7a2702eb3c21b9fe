//! Order and number of the messages that a donor may send.
//!
//! A donor sends rounds while its process runs (shape, memory, descriptors, observed states of connections); the first
//! round has a state preview before any memory. Then the donor announces the freeze, and sends the rest once:
//! last descriptors, states of sockets, state, checksums if requested, and an answer about locks if asked.
//! [`MessageSequence`] checks each message before it takes effect, and refuses messages that a donor of this release never
//! sends.
//!
//! A new kind of message is added to [`DonorMessageKind`]; [`MessageSequence::accept`] then does not compile until the place of the
//! message is defined.

/// Most shapes of a tree. A freeze that is attempted repeatedly sends one shape every millisecond for 300 ms.
const TREES_MAX: u32 = 1 << 16;
/// Most messages with observed states of connections.
const TCP_SNAPSHOTS_MAX: u32 = 1 << 18;
/// Most announcements of a freeze: one for each attempt.
const FREEZES_MAX: u32 = 1 << 12;
/// Most messages with states of sockets: one for each socket, if sockets move one by one.
const SOCKETS_MAX: u32 = 1 << 20;

/// Kind of a donor's message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DonorMessageKind {
    /// The tree's shape.
    Tree,
    /// Memory pages.
    Pages,
    /// Addresses of memory that is sent after the process resumes (post-copy).
    MissingPages,
    /// Descriptors of the running tree.
    Descriptors,
    /// State of processes and threads, as far as it is known while they run.
    StatePreview,
    /// States of connections, observed while the tree runs.
    TcpSnapshots,
    /// Announcement that the tree is about to be stopped.
    FreezeStart,
    /// Descriptors of the stopped tree.
    LastDescriptors,
    /// States of some sockets of the stopped tree.
    Sockets,
    /// States of the remaining sockets.
    LastSockets,
    /// State of processes and threads.
    State,
    /// Checksums of the tree.
    Digest,
    /// The donor's answer to the request to share its exclusive locks.
    Locks,
    /// Memory that is sent after the process resumes (post-copy).
    PostcopyPages,
    /// The donor has lost memory that was still to be sent.
    PostcopyLost,
}

/// Progress of a conversation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum TransferPhase {
    /// No message was received.
    #[default]
    New,
    /// Rounds are being received.
    PreCopy,
    /// The last descriptors were received.
    Stopped,
    /// The states of all sockets were received.
    Sockets,
    /// The state was received: the process can run.
    Complete,
    /// Checksums were received.
    Verified,
}

/// Messages of one move that a donor has sent so far.
#[derive(Clone, Debug, Default)]
pub struct MessageSequence {
    phase: TransferPhase,
    trees: u32,
    tcp_snapshots: u32,
    freezes: u32,
    sockets: u32,
    /// True if descriptors of any round were received.
    has_descriptors: bool,
    /// True if descriptors were received since the last shape.
    has_round_descriptors: bool,
    /// True if missing memory was named since the last shape.
    has_missing_pages: bool,
    /// True if a state preview was received.
    has_state_preview: bool,
    /// True if the donor has answered about locks.
    has_lock_answer: bool,
}

impl MessageSequence {
    /// Checks the next message, and counts it.
    ///
    /// # Errors
    /// Reason why the message is not allowed at this point. The move must be refused: all later messages are invalid
    /// too.
    pub fn accept(&mut self, message: DonorMessageKind) -> Result<(), String> {
        let refuse = |why: &str| Err(format!("the donor's message {message:?} {why}"));
        let in_order = match message {
            DonorMessageKind::Tree => self.phase <= TransferPhase::PreCopy,
            DonorMessageKind::Pages => {
                self.phase == TransferPhase::PreCopy && self.has_state_preview
            }
            DonorMessageKind::Descriptors => self.phase == TransferPhase::PreCopy,
            DonorMessageKind::TcpSnapshots | DonorMessageKind::StatePreview => {
                self.phase == TransferPhase::PreCopy && self.has_descriptors
            }
            DonorMessageKind::FreezeStart => {
                self.phase == TransferPhase::PreCopy && self.has_descriptors
            }
            DonorMessageKind::MissingPages => {
                self.phase == TransferPhase::PreCopy && self.freezes > 0
            }
            DonorMessageKind::LastDescriptors => {
                self.phase == TransferPhase::PreCopy && self.freezes > 0
            }
            DonorMessageKind::Sockets | DonorMessageKind::LastSockets => {
                self.phase == TransferPhase::Stopped
            }
            DonorMessageKind::State => self.phase == TransferPhase::Sockets,
            DonorMessageKind::Digest => self.phase == TransferPhase::Complete,
            DonorMessageKind::Locks => self.phase >= TransferPhase::Complete,
            DonorMessageKind::PostcopyPages | DonorMessageKind::PostcopyLost => false,
        };
        if !in_order {
            return refuse("is out of order");
        }
        let increment = |count: &mut u32| {
            *count += 1;
            *count
        };
        let too_many = match message {
            DonorMessageKind::Tree => increment(&mut self.trees) > TREES_MAX,
            DonorMessageKind::TcpSnapshots => {
                increment(&mut self.tcp_snapshots) > TCP_SNAPSHOTS_MAX
            }
            DonorMessageKind::FreezeStart => increment(&mut self.freezes) > FREEZES_MAX,
            DonorMessageKind::Sockets => increment(&mut self.sockets) > SOCKETS_MAX,
            DonorMessageKind::Descriptors => {
                std::mem::replace(&mut self.has_round_descriptors, true)
            }
            DonorMessageKind::StatePreview => std::mem::replace(&mut self.has_state_preview, true),
            DonorMessageKind::MissingPages => std::mem::replace(&mut self.has_missing_pages, true),
            DonorMessageKind::Locks => std::mem::replace(&mut self.has_lock_answer, true),
            // Messages that are bounded by their phases, or by the memory that they fill.
            DonorMessageKind::Pages
            | DonorMessageKind::LastDescriptors
            | DonorMessageKind::LastSockets
            | DonorMessageKind::State
            | DonorMessageKind::Digest
            | DonorMessageKind::PostcopyPages
            | DonorMessageKind::PostcopyLost => false,
        };
        if too_many {
            return refuse("came too often");
        }
        match message {
            DonorMessageKind::Tree => {
                self.phase = TransferPhase::PreCopy;
                (self.has_round_descriptors, self.has_missing_pages) = (false, false);
            }
            DonorMessageKind::Descriptors => self.has_descriptors = true,
            DonorMessageKind::LastDescriptors => self.phase = TransferPhase::Stopped,
            DonorMessageKind::LastSockets => self.phase = TransferPhase::Sockets,
            DonorMessageKind::State => self.phase = TransferPhase::Complete,
            DonorMessageKind::Digest => self.phase = TransferPhase::Verified,
            DonorMessageKind::Pages
            | DonorMessageKind::MissingPages
            | DonorMessageKind::TcpSnapshots
            | DonorMessageKind::StatePreview
            | DonorMessageKind::FreezeStart
            | DonorMessageKind::Sockets
            | DonorMessageKind::Locks
            | DonorMessageKind::PostcopyPages
            | DonorMessageKind::PostcopyLost => {}
        }
        Ok(())
    }

    /// Returns true if everything was received that the process needs to run.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.phase >= TransferPhase::Complete
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ALL_MESSAGES: [DonorMessageKind; 15] = [
        DonorMessageKind::Tree,
        DonorMessageKind::Pages,
        DonorMessageKind::MissingPages,
        DonorMessageKind::Descriptors,
        DonorMessageKind::StatePreview,
        DonorMessageKind::TcpSnapshots,
        DonorMessageKind::FreezeStart,
        DonorMessageKind::LastDescriptors,
        DonorMessageKind::Sockets,
        DonorMessageKind::LastSockets,
        DonorMessageKind::State,
        DonorMessageKind::Digest,
        DonorMessageKind::Locks,
        DonorMessageKind::PostcopyPages,
        DonorMessageKind::PostcopyLost,
    ];

    fn accept_all(messages: &[DonorMessageKind]) -> Result<MessageSequence, String> {
        let mut conversation = MessageSequence::default();
        for message in messages {
            conversation.accept(*message)?;
        }
        Ok(conversation)
    }

    #[test]
    fn complete_move_is_in_order() {
        use DonorMessageKind::*;
        let messages = [
            Tree,
            Descriptors,
            StatePreview,
            Pages,
            TcpSnapshots,
            Pages,
            Tree,
            Pages,
            Descriptors,
            TcpSnapshots,
            FreezeStart,
            Pages,
            Tree,
            Pages,
            MissingPages,
            Tree,
            Pages,
            MissingPages,
            LastDescriptors,
            Sockets,
            Sockets,
            LastSockets,
            State,
            Digest,
            Locks,
        ];
        for length in 0..=messages.len() {
            let conversation = accept_all(&messages[..length]).expect("in order");
            assert_eq!(conversation.is_complete(), length >= messages.len() - 2);
        }
    }

    #[test]
    fn repeated_or_unexpected_messages_are_refused() {
        use DonorMessageKind::*;
        let stopped = [Tree, Descriptors, FreezeStart, LastDescriptors];
        let complete = [&stopped[..], &[LastSockets, State]].concat();
        let refused_sequences: [&[DonorMessageKind]; 11] = [
            &[Pages],
            &[Tree, Descriptors, Pages],
            &[Tree, StatePreview],
            &[Tree, Descriptors, StatePreview, StatePreview],
            &[Tree, TcpSnapshots],
            &[Tree, Descriptors, Descriptors],
            &[Tree, FreezeStart],
            &[Tree, Descriptors, LastDescriptors],
            &[Tree, Descriptors, FreezeStart, MissingPages, MissingPages],
            &[Tree, Descriptors, FreezeStart, State],
            &[Tree, PostcopyPages],
        ];
        for messages in refused_sequences {
            assert!(accept_all(messages).is_err(), "{messages:?}");
        }
        for message in [
            Tree,
            Pages,
            MissingPages,
            Descriptors,
            FreezeStart,
            LastDescriptors,
            State,
            Digest,
            Locks,
        ] {
            assert!(
                accept_all(&[&stopped[..], &[message]].concat()).is_err(),
                "{message:?}"
            );
        }
        assert!(accept_all(&[&complete[..], &[Locks, Locks]].concat()).is_err());
        let allowed = [Digest, Locks];
        for message in ALL_MESSAGES
            .into_iter()
            .filter(|message| !allowed.contains(message))
        {
            assert!(
                accept_all(&[&complete[..], &[message]].concat()).is_err(),
                "{message:?}"
            );
        }
        let mut sequence = accept_all(&[Tree, Descriptors, FreezeStart]).expect("in order");
        let accepted = (0..2 * FREEZES_MAX).take_while(|_| sequence.accept(FreezeStart).is_ok());
        assert_eq!(accepted.count() as u32, FREEZES_MAX - 1);
    }

    proptest! {
        /// For any messages in any order: the state is accepted once, after descriptors; only checksums and an answer
        /// about locks may follow.
        #[test]
        fn random_messages_keep_order(choices in proptest::collection::vec(0usize..ALL_MESSAGES.len(), 0..200)) {
            let mut conversation = MessageSequence::default();
            let mut accepted = Vec::new();
            for choice in choices {
                if conversation.accept(ALL_MESSAGES[choice]).is_ok() {
                    accepted.push(ALL_MESSAGES[choice]);
                }
            }
            let at = |message: DonorMessageKind| accepted.iter().position(|one| *one == message);
            let count = |message: DonorMessageKind| accepted.iter().filter(|one| **one == message).count();
            for message in [DonorMessageKind::LastDescriptors, DonorMessageKind::LastSockets, DonorMessageKind::State, DonorMessageKind::Digest, DonorMessageKind::Locks] {
                prop_assert!(count(message) <= 1);
            }
            prop_assert!(accepted.first().is_none_or(|first| *first == DonorMessageKind::Tree));
            if let Some(frozen) = at(DonorMessageKind::State) {
                prop_assert!(at(DonorMessageKind::LastSockets) < Some(frozen));
                prop_assert!(at(DonorMessageKind::LastDescriptors) < at(DonorMessageKind::LastSockets));
                prop_assert!(accepted[frozen + 1..].iter().all(|one| matches!(one, DonorMessageKind::Digest | DonorMessageKind::Locks)));
            }
            prop_assert_eq!(conversation.is_complete(), at(DonorMessageKind::State).is_some());
        }
    }
}
