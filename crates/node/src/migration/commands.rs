//! Execution of the migration machine's commands.

use holdfast_checkpoint::acceptor::Restorer;
use holdfast_checkpoint::donor::ProcessRef;
use holdfast_checkpoint::postcopy;
use holdfast_proto::migration::{
    Command, CommandToken, Completion, FlowEpoch, ProcessId, Results, ResumeReport,
};
use holdfast_wire::failure::{Context, Failure, NodeFault, OperatorFault};
use holdfast_wire::move_frames::{DonorFlowEpoch, MoveOffer};
use holdfast_wire::{MoveId, NodeId};

use super::acceptor::{self, AcceptorThread};
use super::admission_policy::ProcessDescription;
use super::arrived_processes::ProcessInfo;
use super::command_names::token_of;
use super::donor::{self, DonorThread};
use super::donor_sockets::MoveOptions;
use super::move_records::{MoveRole, RecordEntry};
use super::{
    Migrations, admission_policy, crash_recovery, lock_handover, process_check, systemd_units,
};
use crate::failure_conversion::{IntoFailure, thread_failure};

/// Results of a command that completes at once; `None` if a thread reports them later.
type ImmediateResults = Option<Results>;

impl Migrations {
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
                let options = MoveOptions {
                    sockets,
                    after_hold: self.settings.every_node_receives,
                    is_clone: clone,
                    verify,
                    rehearsal,
                    realtime: self.settings.realtime,
                };
                self.copy_round(token, id, (process, to, options), round)
            }
            Command::SaveFlows {
                id, flows, peers, ..
            } => {
                let record = self.records.record_of(id, MoveRole::Donor);
                Some(Results::FlowsSaved(
                    record.write(&RecordEntry::MayDivert { flows, peers }),
                ))
            }
            Command::Freeze {
                id,
                flows,
                post_copy,
                ..
            } => self.freeze(token, id, &flows, post_copy),
            Command::Thaw { id, .. } => self.thaw(token, id),
            Command::Release { id, to, .. } => self.release(token, id, to),
            Command::Examine { offer, .. } => Some(Results::Examined(self.examine_offer(&offer))),
            Command::Build { id, offer, .. } => self.build_process(token, id, &offer),
            // The owner, which has the filters, does the other part of this command.
            Command::Arm { id, flows, .. } => {
                Some(Results::Armed(self.record_armed_flows(id, flows)))
            }
            Command::Restore {
                id, flows, peers, ..
            } => {
                let flows = (!self.acceptor_moves.are_armed(id, &flows)).then_some(flows);
                let entry = RecordEntry::Restored { flows, peers };
                let thread_ended = || Results::Restored(Err(NodeFault::ThreadEnded.into()));
                self.send_to_acceptor(
                    id,
                    acceptor::AcceptorJob::Restore(token, entry),
                    thread_ended,
                )
            }
            Command::Resume { id, .. } => self.resume_process(token, id),
            Command::Discard { id, .. } => self.discard_process(token, id),
            Command::Forget { id, .. } => {
                self.remove_records(id);
                Some(Results::Forgotten)
            }
            // Commands that the owner alone carries out.
            Command::Translate { .. } | Command::Arbitrate { .. } | Command::Lookup { .. } => None,
        };
        results.map(|results| Completion { token, results })
    }

    fn check_process(
        &self,
        token: CommandToken,
        process: ProcessId,
        is_clone: bool,
    ) -> ImmediateResults {
        let pid = i32::try_from(process.0).unwrap_or(0);
        let hops = self.arrived_processes.move_count(pid);
        let context = (self.settings.addresses.clone(), self.units());
        process_check::start_machine_check(
            token,
            (process, is_clone),
            hops,
            context,
            self.events.clone(),
        );
        None
    }

    fn copy_round(
        &mut self,
        token: CommandToken,
        id: MoveId,
        (process, to, options): (ProcessId, NodeId, MoveOptions),
        round: u32,
    ) -> ImmediateResults {
        if round == 1
            && let Err(why) = self.start_donor(id, process, to, options)
        {
            return Some(Results::Copied(Err(why)));
        }
        let thread_ended = || Results::Copied(Err(NodeFault::ThreadEnded.into()));
        self.send_to_donor(id, donor::DonorJob::Round(token), thread_ended)
    }

    fn start_donor(
        &mut self,
        id: MoveId,
        process: ProcessId,
        to: NodeId,
        options: MoveOptions,
    ) -> Result<(), Failure> {
        let root = i32::try_from(process.0)
            .map_err(|_| OperatorFault::NoSuchProcess { pid: process.0 })?;
        let record = self.records.record_of(id, MoveRole::Donor);
        record.write(&RecordEntry::Donor {
            process: process.0,
            name: admission_policy::process_name(root),
            to,
            clone: options.is_clone,
            hops: self.arrived_processes.move_count(root),
        })?;
        let context = (record, self.settings.addresses.clone());
        let donor = DonorThread::start(id, root, to, context, options, self.events.clone());
        let donor = donor.map_err(|error| thread_failure(&error))?;
        self.donor_moves.add(id, donor);
        Ok(())
    }

    fn send_to_donor(
        &mut self,
        id: MoveId,
        job: donor::DonorJob,
        thread_ended: impl FnOnce() -> Results,
    ) -> ImmediateResults {
        (!self.donor_moves.send_job(id, job)).then(thread_ended)
    }

    fn freeze(
        &mut self,
        token: CommandToken,
        id: MoveId,
        flows: &[FlowEpoch],
        post_copy: bool,
    ) -> ImmediateResults {
        let flows = flows.iter().map(|flow_epoch| flow_epoch.flow).collect();
        if let Err(why) = self
            .records
            .record_of(id, MoveRole::Donor)
            .write(&RecordEntry::MayFreeze)
        {
            return Some(Results::Frozen(Err(why)));
        }
        let thread_ended = || Results::Frozen(Err(NodeFault::ThreadEnded.into()));
        self.send_to_donor(
            id,
            donor::DonorJob::Freeze(token, flows, post_copy),
            thread_ended,
        )
    }

    fn thaw(&mut self, token: CommandToken, id: MoveId) -> ImmediateResults {
        if self.donor_moves.send_job(id, donor::DonorJob::Thaw(token)) {
            return None;
        }
        // An earlier daemon stopped the process, or its thread has ended; in both cases the tree is stopped for good.
        let entries = self.records.record_of(id, MoveRole::Donor).read();
        let given_locks = crash_recovery::given_locks(&entries);
        if !given_locks.is_empty() {
            let thaw = move || crash_recovery::thaw(&entries);
            let resumed = lock_handover::regain_then_thaw(
                (id, token),
                given_locks,
                thaw,
                self.events.clone(),
            );
            let failed = |error| Results::Thawed(Err(thread_failure(&error)));
            return resumed.err().map(failed);
        }
        let thawed = crash_recovery::thaw(&entries);
        self.on_thawed(id);
        Some(Results::Thawed(thawed))
    }

    /// Cleans up after the process was resumed here. The `MayDivert` entry stays, emptied, until no node asks about the
    /// move.
    fn on_thawed(&mut self, id: MoveId) {
        self.donor_moves.remove(id);
        let record = self.records.record_of(id, MoveRole::Donor);
        let mut entries = record.read();
        entries.retain(|entry| {
            matches!(
                entry,
                RecordEntry::Donor { .. } | RecordEntry::MayDivert { .. }
            )
        });
        for entry in &mut entries {
            if let RecordEntry::MayDivert { flows, peers } = entry {
                flows.clear();
                peers.clear();
            }
        }
        match entries.len() {
            0 | 1 => record.remove(),
            _ => {
                if let Err(error) = record.replace(&entries) {
                    tracing::warn!(%id, %error, "cannot update a move's record");
                }
            }
        }
    }

    fn release(&mut self, token: CommandToken, id: MoveId, to: NodeId) -> ImmediateResults {
        if self
            .donor_moves
            .send_job(id, donor::DonorJob::Release(token))
        {
            return None;
        }
        let record = self.records.record_of(id, MoveRole::Donor);
        let entries = record.read();
        let context = (self.settings.addresses.clone(), self.events.clone());
        if let Some(pids) = crash_recovery::postcopy_pids(&entries) {
            match DonorThread::start_postcopy_sender((id, to), pids, record, token, context) {
                Ok(donor) => self.donor_moves.add(id, donor),
                Err(error) => {
                    return Some(Results::Released(Err(thread_failure(&error))));
                }
            }
            return None;
        }
        if crash_recovery::held_processes(&entries).next().is_none() {
            self.on_released(id);
            return Some(Results::Released(Ok(())));
        }
        match DonorThread::start_recovered_release((id, to), record, token, context) {
            Ok(()) => None,
            Err(error) => Some(Results::Released(Err(thread_failure(&error)))),
        }
    }

    fn on_released(&mut self, id: MoveId) {
        self.donor_moves.remove(id);
        self.records.record_of(id, MoveRole::Donor).remove();
        self.arrived_processes.remove_ended();
    }

    fn examine_offer(&self, offer: &MoveOffer) -> Result<(), Vec<Failure>> {
        let description =
            ProcessDescription::decode(&offer.description).map_err(|why| vec![why])?;
        let mut refusals = self.policy.refusals(&description, offer.memory_bytes);
        let group = description.group.iter();
        refusals.extend(
            group.flat_map(|group| systemd_units::group_refusals(&self.settings.cgroups, group)),
        );
        let probe = || {
            postcopy::probe()?;
            match self.policy.has_root() {
                true => Ok(()),
                false => postcopy::probe_device(),
            }
        };
        if offer.post_copy
            && let Err(error) = probe()
        {
            let failure = error.into_own_failure();
            refusals.push(failure.within(Context::PostCopyUnsupported));
        }
        match refusals.is_empty() {
            true => Ok(()),
            false => Err(refusals),
        }
    }

    fn build_process(
        &mut self,
        token: CommandToken,
        id: MoveId,
        offer: &MoveOffer,
    ) -> ImmediateResults {
        let build_failed = |why| Some(Results::Built(Err(why)));
        let description = match ProcessDescription::decode(&offer.description) {
            Ok(description) => description,
            Err(why) => return build_failed(why),
        };
        let policy = self.policy.for_process(&description);
        let ProcessDescription { name, group, .. } = description;
        let info = ProcessInfo {
            name,
            hops: offer.hops,
            group: group.as_ref().map(|group| group.path().to_owned()),
        };
        let record = self.records.record_of(id, MoveRole::Acceptor);
        let entry = RecordEntry::Acceptor {
            name: info.name.clone(),
            hops: info.hops,
            group: info.group.clone(),
        };
        if let Err(why) = record.write(&entry) {
            return build_failed(why);
        }
        let group = group.map(|group| (self.settings.cgroups.clone(), group));
        let adoption_socket = self.records.adoption_socket(id);
        let events = self.events.clone();
        let options = (info, offer.clone, group, self.settings.realtime);
        match AcceptorThread::start(id, policy, (record, adoption_socket), options, events) {
            Ok(acceptor) => self.acceptor_moves.add(id, acceptor),
            Err(error) => return build_failed(thread_failure(&error)),
        }
        let thread_ended = || Results::Built(Err(NodeFault::ThreadEnded.into()));
        self.send_to_acceptor(id, acceptor::AcceptorJob::Build(token), thread_ended)
    }

    fn record_armed_flows(
        &mut self,
        id: MoveId,
        flows: Vec<DonorFlowEpoch>,
    ) -> Result<(), Failure> {
        self.acceptor_moves.add_armed_flows(id, &flows);
        let record = self.records.record_of(id, MoveRole::Acceptor);
        record.write(&RecordEntry::ArmedFlows(flows))
    }

    fn send_to_acceptor(
        &mut self,
        id: MoveId,
        job: acceptor::AcceptorJob,
        thread_ended: impl FnOnce() -> Results,
    ) -> ImmediateResults {
        (!self.acceptor_moves.send_job(id, job)).then(thread_ended)
    }

    fn resume_process(&mut self, token: CommandToken, id: MoveId) -> ImmediateResults {
        if self
            .acceptor_moves
            .send_job(id, acceptor::AcceptorJob::Resume(token))
        {
            return None;
        }
        let entries = self.records.record_of(id, MoveRole::Acceptor).read();
        let adopted =
            match crash_recovery::adopt_restorer(&entries, &self.records.adoption_socket(id)) {
                Ok(adopted) => adopted,
                Err(why) => return Some(Results::Resumed(Err(why))),
            };
        let restorer = match adopted {
            Some((restorer, locks)) if !locks.is_empty() => {
                let events = self.events.clone();
                let started =
                    lock_handover::acquire_then_report((id, token), restorer, locks, events);
                let failed = |error| Results::Resumed(Err(thread_failure(&error)));
                return started.err().map(failed);
            }
            adopted => adopted.map(|(restorer, _)| restorer),
        };
        Some(Results::Resumed(self.resume_adopted(id, restorer)))
    }

    /// Resumes a process that an earlier daemon restored and that has its locks. No restorer means that it already
    /// runs.
    pub(super) fn resume_adopted(
        &mut self,
        id: MoveId,
        restorer: Option<Restorer>,
    ) -> Result<ResumeReport, Failure> {
        let record = self.records.record_of(id, MoveRole::Acceptor);
        let (restorer, fault_handler) = crash_recovery::resume_adopted(
            &record.read(),
            restorer,
            &self.records.adoption_socket(id),
            &record,
        )?;
        self.register_running(id, restorer);
        if let Some(fault_handler) = fault_handler {
            self.start_postcopy_receiver(id, fault_handler)?;
        }
        Ok(ResumeReport::default())
    }

    /// Registers a process that runs here, from its record.
    fn register_running(&mut self, id: MoveId, child: Option<Restorer>) {
        let entries = self.records.record_of(id, MoveRole::Acceptor).read();
        if let Some(restorer) = crash_recovery::restorer_of(&entries) {
            self.register_arrived_process(
                id,
                restorer,
                child,
                crash_recovery::process_info(&entries),
            );
        }
    }

    /// Adds a process that has arrived here and runs to the list of residents.
    pub(super) fn register_arrived_process(
        &mut self,
        id: MoveId,
        restorer: ProcessRef,
        child: Option<Restorer>,
        info: ProcessInfo,
    ) {
        let donor_name = self.settings.name_of(id.donor);
        self.arrived_processes
            .add(restorer, child, (info, donor_name));
    }

    fn discard_process(&mut self, token: CommandToken, id: MoveId) -> ImmediateResults {
        if self
            .acceptor_moves
            .send_job(id, acceptor::AcceptorJob::Discard(token))
        {
            return None;
        }
        let record = self.records.record_of(id, MoveRole::Acceptor);
        let entries = record.read();
        crash_recovery::discard(&entries, &self.records.adoption_socket(id), &record);
        if let Some(group) = crash_recovery::process_info(&entries).group {
            self.arrived_processes.remove_group_later(group);
        }
        self.acceptor_moves.remove(id);
        Some(Results::Discarded)
    }

    /// Cleans up after a command that a thread has completed.
    pub(super) fn on_command_end(&mut self, id: MoveId, results: &Results) {
        match results {
            Results::Thawed(Ok(())) => self.on_thawed(id),
            Results::Released(Ok(())) => self.on_released(id),
            // Remaining pages are still being sent.
            Results::Resumed(Ok(_)) if self.acceptor_moves.is_in_postcopy(id) => {}
            Results::Discarded | Results::Resumed(Ok(_)) => self.acceptor_moves.remove(id),
            _ => {}
        }
    }

    fn remove_records(&mut self, id: MoveId) {
        self.records.record_of(id, MoveRole::Donor).remove();
        self.records.record_of(id, MoveRole::Acceptor).remove();
    }
}
