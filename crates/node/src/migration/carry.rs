//! Execution of the migration machine's commands.

use holdfast_proto::migration::{Command, Completion, FlowEpoch, ProcessId, Results, Token, Went};
use holdfast_sys::process::acceptor::Restorer;
use holdfast_sys::process::donor::Held;
use holdfast_sys::process::following;
use holdfast_wire::migration::{FlowAt, Offer};
use holdfast_wire::{MoveId, NodeId};

use super::acceptor::{self, Acceptor};
use super::connections::Ways;
use super::donor::{self, Donor};
use super::names::token_of;
use super::policy::Description;
use super::records::{Entry, Role};
use super::residents::Came;
use super::{Moves, check, left, locks, policy, units};

/// Results of a command that completes at once; `None` if a thread reports them later.
type Now = Option<Results>;

impl Moves {
    /// Executes a command, unless it is for the holder. Returns the completion, or `None` if a thread will report it
    /// later.
    pub(crate) fn execute(&mut self, command: Command) -> Option<Completion> {
        let token = token_of(&command);
        let results = match command {
            Command::Check { process, clone, .. } => self.check_process(token, process, clone),
            Command::CopyRound {
                id,
                process,
                to,
                sockets,
                clone,
                verify,
                rehearsal,
                round,
                ..
            } => {
                let ways = Ways {
                    sockets,
                    late: self.broadcast,
                    copy: clone,
                    verify,
                    rehearsal,
                    hurries: self.hurries,
                };
                self.copy_round(token, id, (process, to, ways), round)
            }
            Command::Note {
                id, flows, peers, ..
            } => {
                let record = self.records.of(id, Role::Gives);
                Some(Results::Noted(record.write(&Entry::Noted { flows, peers })))
            }
            Command::Freeze {
                id,
                flows,
                post_copy,
                ..
            } => self.freeze(token, id, &flows, post_copy),
            Command::Thaw { id, .. } => self.thaw(token, id),
            Command::Release { id, to, .. } => self.release(token, id, to),
            Command::Examine { offer, .. } => Some(Results::Examined(self.examine(&offer))),
            Command::Build { id, offer, .. } => self.build(token, id, &offer),
            // The owner, which has the filters, does the other part of this command.
            Command::Arm { id, flows, .. } => Some(Results::Armed(self.arm(id, flows))),
            Command::Restore {
                id, flows, peers, ..
            } => {
                let flows = (self.armed.get(&id) != Some(&flows)).then_some(flows);
                let entry = Entry::Restored { flows, peers };
                let gone = || Results::Restored(Err("its thread has ended".to_owned()));
                self.acceptor_job(id, acceptor::Job::Restore(token, entry), gone)
            }
            Command::Go { id, .. } => self.go(token, id),
            Command::Discard { id, .. } => self.discard(token, id),
            Command::Forget { id, .. } => {
                self.forget(id);
                Some(Results::Forgotten)
            }
            // Commands that the owner alone carries out.
            Command::Translate { .. } | Command::Arbitrate { .. } | Command::Lookup { .. } => None,
        };
        results.map(|results| Completion { token, results })
    }

    fn check_process(&self, token: Token, process: ProcessId, copy: bool) -> Now {
        let pid = i32::try_from(process.0).unwrap_or(0);
        let hops = self.residents.moves_of(pid);
        let with = (self.addresses.clone(), self.units());
        check::for_machine(token, (process, copy), hops, with, self.teller.clone());
        None
    }

    fn copy_round(
        &mut self,
        token: Token,
        id: MoveId,
        (process, to, ways): (ProcessId, NodeId, Ways),
        round: u32,
    ) -> Now {
        if round == 1
            && let Err(why) = self.begin_to_give(id, process, to, ways)
        {
            return Some(Results::Copied(Err(why)));
        }
        let gone = || Results::Copied(Err("its thread has ended".to_owned()));
        self.donor_job(id, donor::Job::Round(token), gone)
    }

    fn begin_to_give(
        &mut self,
        id: MoveId,
        process: ProcessId,
        to: NodeId,
        ways: Ways,
    ) -> Result<(), String> {
        let root = i32::try_from(process.0).map_err(|_| "no such process".to_owned())?;
        let record = self.records.of(id, Role::Gives);
        record.write(&Entry::Gives {
            process: process.0,
            name: policy::name_of(root),
            to,
            clone: ways.copy,
            hops: self.residents.moves_of(root),
        })?;
        let with = (record, self.addresses.clone());
        let donor = Donor::start(id, root, to, with, ways, self.teller.clone());
        let donor = donor.map_err(|error| format!("no thread for it: {error}"))?;
        self.donors.insert(id, donor);
        Ok(())
    }

    fn donor_job(&mut self, id: MoveId, job: donor::Job, gone: impl FnOnce() -> Results) -> Now {
        let runs = self.donors.get(&id).is_some_and(|donor| donor.job(job));
        (!runs).then(gone)
    }

    fn freeze(&mut self, token: Token, id: MoveId, flows: &[FlowEpoch], post_copy: bool) -> Now {
        let flows = flows.iter().map(|of| of.flow).collect();
        if let Err(why) = self.records.of(id, Role::Gives).write(&Entry::Freezes) {
            return Some(Results::Frozen(Err(why)));
        }
        let gone = || Results::Frozen(Err("its thread has ended".to_owned()));
        self.donor_job(id, donor::Job::Freeze(token, flows, post_copy), gone)
    }

    fn thaw(&mut self, token: Token, id: MoveId) -> Now {
        if self
            .donors
            .get(&id)
            .is_some_and(|donor| donor.job(donor::Job::Thaw(token)))
        {
            return None;
        }
        // An earlier daemon stopped the process, or its thread has ended; in both cases the tree is stopped for good.
        let entries = self.records.of(id, Role::Gives).read();
        let given = left::given_locks(&entries);
        if !given.is_empty() {
            let thaw = move || left::thaw(&entries);
            let resumed = locks::resume((id, token), given, thaw, self.teller.clone());
            let failed = |error| Results::Thawed(Err(format!("no thread for its locks: {error}")));
            return resumed.err().map(failed);
        }
        let thawed = left::thaw(&entries);
        self.thawed(id);
        Some(Results::Thawed(thawed))
    }

    /// Cleans up after the process was resumed here. The `Noted` entry stays, emptied, until no node asks about the
    /// move.
    fn thawed(&mut self, id: MoveId) {
        self.end_donor(id);
        let record = self.records.of(id, Role::Gives);
        let mut entries = record.read();
        entries.retain(|entry| matches!(entry, Entry::Gives { .. } | Entry::Noted { .. }));
        for entry in &mut entries {
            if let Entry::Noted { flows, peers } = entry {
                flows.clear();
                peers.clear();
            }
        }
        match entries.len() {
            0 | 1 => record.remove(),
            _ => {
                if let Err(error) = record.replace(&entries) {
                    tracing::warn!(%id, error, "what was written down of a move stays");
                }
            }
        }
    }

    fn release(&mut self, token: Token, id: MoveId, to: NodeId) -> Now {
        if self
            .donors
            .get(&id)
            .is_some_and(|donor| donor.job(donor::Job::Release(token)))
        {
            return None;
        }
        let record = self.records.of(id, Role::Gives);
        let entries = record.read();
        if let Some(pids) = left::followed(&entries) {
            match Donor::resume((id, to), pids, record, token, self.teller.clone()) {
                Ok(donor) => drop(self.donors.insert(id, donor)),
                Err(error) => return Some(Results::Released(Err(format!("no thread: {error}")))),
            }
            return None;
        }
        let released = left::release(&entries);
        if released.is_ok() {
            self.released(id);
        }
        Some(Results::Released(released))
    }

    fn released(&mut self, id: MoveId) {
        self.end_donor(id);
        self.records.of(id, Role::Gives).remove();
        self.residents.look();
    }

    fn examine(&self, offer: &Offer) -> Result<(), Vec<String>> {
        let description = Description::decode(&offer.description).map_err(|why| vec![why])?;
        let mut refusals = self.policy.refusals(&description, offer.memory);
        let group = description.group.iter();
        refusals.extend(group.flat_map(|group| units::refusals(&self.groups, group)));
        let probe = || {
            following::probe()?;
            match self.policy.has_root() {
                true => Ok(()),
                false => following::probe_device(),
            }
        };
        if offer.post_copy
            && let Err(error) = probe()
        {
            refusals.push(format!("it takes no memory that follows: {error}"));
        }
        match refusals.is_empty() {
            true => Ok(()),
            false => Err(refusals),
        }
    }

    fn build(&mut self, token: Token, id: MoveId, offer: &Offer) -> Now {
        let failed = |why| Some(Results::Built(Err(why)));
        let description = match Description::decode(&offer.description) {
            Ok(description) => description,
            Err(why) => return failed(why),
        };
        let policy = self.policy.of(&description);
        let Description { name, group, .. } = description;
        let came = Came {
            name,
            hops: offer.hops,
            group: group.as_ref().map(|group| group.path().to_owned()),
        };
        let record = self.records.of(id, Role::Takes);
        let takes = Entry::Takes {
            name: came.name.clone(),
            hops: came.hops,
            group: came.group.clone(),
        };
        if let Err(why) = record.write(&takes) {
            return failed(why);
        }
        let group = group.map(|group| (self.groups.clone(), group));
        let back = self.records.way_back(id);
        let teller = self.teller.clone();
        let of = (came, offer.clone, group, self.hurries);
        match Acceptor::start(id, policy, (record, back), of, teller) {
            Ok(acceptor) => self.acceptors.insert(id, acceptor),
            Err(error) => return failed(format!("no thread for it: {error}")),
        };
        let gone = || Results::Built(Err("its thread has ended".to_owned()));
        self.acceptor_job(id, acceptor::Job::Build(token), gone)
    }

    fn arm(&mut self, id: MoveId, flows: Vec<FlowAt>) -> Result<(), String> {
        let armed = self.armed.entry(id).or_default();
        armed.extend(&flows);
        armed.sort_unstable();
        if let Some(acceptor) = self.acceptors.get(&id) {
            acceptor.job(acceptor::Job::Armed);
        }
        let record = self.records.of(id, Role::Takes);
        record.write(&Entry::Armed(flows))
    }

    fn acceptor_job(
        &mut self,
        id: MoveId,
        job: acceptor::Job,
        gone: impl FnOnce() -> Results,
    ) -> Now {
        let acceptor = self.acceptors.get(&id);
        let runs = acceptor.is_some_and(|acceptor| acceptor.job(job));
        (!runs).then(gone)
    }

    fn go(&mut self, token: Token, id: MoveId) -> Now {
        let acceptor = self.acceptors.get(&id);
        if acceptor.is_some_and(|acceptor| acceptor.job(acceptor::Job::Go(token))) {
            return None;
        }
        let entries = self.records.of(id, Role::Takes).read();
        let adopted = match left::adopt(&entries, &self.records.way_back(id)) {
            Ok(adopted) => adopted,
            Err(why) => return Some(Results::Gone(Err(why))),
        };
        let restorer = match adopted {
            Some((restorer, locks)) if !locks.is_empty() => {
                let teller = self.teller.clone();
                let begun = locks::complete((id, token), restorer, locks, teller);
                let failed =
                    |error| Results::Gone(Err(format!("no thread for its locks: {error}")));
                return begun.err().map(failed);
            }
            adopted => adopted.map(|(restorer, _)| restorer),
        };
        Some(Results::Gone(self.let_go(id, restorer)))
    }

    /// Resumes a process that an earlier daemon restored and that has its locks. No restorer means that it already
    /// runs.
    pub(super) fn let_go(
        &mut self,
        id: MoveId,
        restorer: Option<Restorer>,
    ) -> Result<Went, String> {
        let record = self.records.of(id, Role::Takes);
        let following = left::go(
            &record.read(),
            restorer,
            &self.records.way_back(id),
            &record,
        )?;
        let (restorer, following) = following;
        self.runs(id, restorer);
        if let Some(following) = following {
            self.follow(id, following)?;
        }
        Ok(Went::default())
    }

    /// Registers a process that runs here, from its record.
    fn runs(&mut self, id: MoveId, child: Option<Restorer>) {
        let entries = self.records.of(id, Role::Takes).read();
        if let Some(restorer) = left::restorer_of(&entries) {
            self.came(id, restorer, child, left::came_of(&entries));
        }
    }

    /// Registers a process that runs here.
    pub(super) fn came(&mut self, id: MoveId, restorer: Held, child: Option<Restorer>, came: Came) {
        let from = (self.nodes.get(&id.donor)).map_or_else(String::new, Clone::clone);
        self.residents.came(restorer, child, (came, from));
    }

    fn discard(&mut self, token: Token, id: MoveId) -> Now {
        let acceptor = self.acceptors.get(&id);
        if acceptor.is_some_and(|acceptor| acceptor.job(acceptor::Job::Discard(token))) {
            return None;
        }
        let record = self.records.of(id, Role::Takes);
        let entries = record.read();
        left::discard(&entries, &self.records.way_back(id), &record);
        if let Some(group) = left::came_of(&entries).group {
            self.residents.leave(group);
        }
        self.end_acceptor(id);
        Some(Results::Discarded)
    }

    /// Cleans up after a command that a thread has completed.
    pub(super) fn ended(&mut self, id: MoveId, results: &Results) {
        match results {
            Results::Thawed(Ok(())) => self.thawed(id),
            Results::Released(Ok(())) => self.released(id),
            // Remaining pages are still being sent.
            Results::Gone(Ok(_)) if self.following.contains(&id) => {}
            Results::Discarded | Results::Gone(Ok(_)) => self.end_acceptor(id),
            _ => {}
        }
    }

    fn end_donor(&mut self, id: MoveId) {
        self.donors.remove(&id);
        self.places.remove(&id);
    }

    pub(super) fn end_acceptor(&mut self, id: MoveId) {
        self.acceptors.remove(&id);
        self.untaken.remove(&id);
        self.armed.remove(&id);
        self.packets.remove(&id);
    }

    fn forget(&mut self, id: MoveId) {
        self.records.of(id, Role::Gives).remove();
        self.records.of(id, Role::Takes).remove();
    }
}
