//! Events of the migration threads, and frames about post-copy.

use std::time::Duration;

use holdfast_proto::migration::{Completion, Results};
use holdfast_sys::process::following::Following;
use holdfast_wire::migration::{MoveFrame, Wanted};
use holdfast_wire::{Frame, MoveId, NodeId};

use super::acceptor::Acceptor;
use super::donor::Job;
use super::donor::serve::question;
use super::follow::Follower;
use super::pieces::Kind;
use super::records::{Entry, Role};
use super::told::Told;
use super::{Moves, left};

impl Moves {
    /// Handles an event of a thread. Returns the frame to send, if any.
    pub(crate) fn handle_told(&mut self, now: Duration, told: Told) -> Option<(NodeId, Frame)> {
        match told {
            Told::Piece {
                id,
                to,
                kind,
                more,
                bytes,
            } => {
                let frame = MoveFrame::Piece { kind, more, bytes };
                return Some((to, Frame::Move { id, frame }));
            }
            Told::Took {
                id,
                bytes,
                busy_us,
                problem,
            } => {
                self.took(id, bytes);
                let frame = MoveFrame::Took {
                    bytes,
                    busy_us,
                    problem,
                };
                return Some((id.donor, Frame::Move { id, frame }));
            }
            Told::Judged { id, refusals } => {
                let frame = MoveFrame::Judged { refusals };
                return Some((id.donor, Frame::Move { id, frame }));
            }
            Told::Wanted { id, wanted } => {
                let frame = MoveFrame::Wanted(wanted);
                return Some((id.donor, Frame::Move { id, frame }));
            }
            Told::Inspected { check, inquiry, .. } => self.inspected(now, *check, inquiry),
            Told::Locks { id, bytes } => {
                let frame = MoveFrame::Locks { bytes };
                return Some((id.donor, Frame::Move { id, frame }));
            }
            Told::Locked {
                id,
                token,
                restorer,
            } => {
                // Reported by way of the owner, as if the thread had completed the whole command.
                let results = Results::Gone(self.let_go(id, Some(restorer)));
                self.teller.done(Some(id), Completion { token, results });
            }
            Told::Done { id, completion, .. } => {
                if let Some(id) = id {
                    self.ended(id, &completion.results);
                }
                self.done(now, completion);
            }
            other => self.take_note(other),
        }
        None
    }

    /// Handles an event that concerns this node alone.
    fn take_note(&mut self, told: Told) {
        match told {
            Told::Runs {
                id,
                restorer,
                held,
                came,
                servers,
            } => {
                self.places.insert(id, servers);
                self.came(id, held, Some(restorer), came);
            }
            Told::Follows { id } => drop(self.following.insert(id)),
            Told::Followed { id } => {
                self.following.remove(&id);
                self.end_acceptor(id);
                self.residents.look();
            }
            Told::Memory { id, memory } => self.operations.followed(id, memory),
            Told::Sockets { id, sockets } => drop(self.places.insert(id, sockets)),
            Told::Packets { id, packets } => self.packets.entry(id).or_default().extend(packets),
            // The owner handles all other events. If one gets here, its reply channel closes, which the thread treats
            // as a refusal.
            _ => {}
        }
    }

    /// Records that the acceptor's thread has consumed bytes of pieces.
    fn took(&mut self, id: MoveId, bytes: u64) {
        if let Some(untaken) = self.untaken.get_mut(&id) {
            *untaken = untaken.saturating_sub(usize::try_from(bytes).unwrap_or(0));
        }
    }

    /// Handles an acceptor's request for remaining pages of a process that moved away.
    pub(super) fn wanted(&mut self, from: NodeId, id: MoveId, wanted: Wanted) {
        if let Some(donor) = self.donors.get(&id) {
            if donor.to == from {
                donor.job(Job::Wanted(wanted));
            }
            return;
        }
        if wanted.ranges.is_empty() {
            return;
        }
        // After a restart, the daemon may not know yet that it has to send the pages.
        let is_known = !self.records.of(id, Role::Gives).read().is_empty();
        let lost = "its original is no more: the donor's host was restarted, or gave it up";
        let (kind, bytes) = match is_known {
            true => (Kind::Follows, question().into()),
            false => (Kind::Lost, lost.as_bytes().into()),
        };
        self.teller.tell(Told::Piece {
            id,
            to: from,
            kind: kind as u8,
            more: false,
            bytes,
        });
    }

    /// Handles a piece for a process without a thread here. A donor with remaining pages is told whether they are still
    /// needed.
    pub(super) fn unknown_piece(&self, id: MoveId, kind: u8) {
        tracing::debug!(%id, kind, "a piece of a move that is not known");
        let entries = self.records.of(id, Role::Takes).read();
        let runs = entries.iter().any(|entry| matches!(entry, Entry::Runs));
        if kind != Kind::Follows as u8 || !(entries.is_empty() || runs) {
            return;
        }
        let lives = left::restorer_of(&entries).is_some_and(|restorer| restorer.exists());
        let ended = "it has ended there, or its daemon has, before all its memory had come";
        let wanted = Wanted {
            all: true,
            ranges: Vec::new(),
            problem: (!lives).then(|| ended.to_owned()),
        };
        self.teller.tell(Told::Wanted { id, wanted });
    }

    /// Starts receiving the remaining pages of a process that an earlier daemon restored.
    pub(super) fn follow(&mut self, id: MoveId, following: Following) -> Result<(), String> {
        let follower = Follower::new(id, following, self.teller.clone());
        let acceptor = Acceptor::follow(follower);
        let acceptor = acceptor.map_err(|error| format!("no thread for it: {error}"))?;
        self.following.insert(id);
        self.acceptors.insert(id, acceptor);
        Ok(())
    }
}
