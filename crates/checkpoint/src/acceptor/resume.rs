//! Resuming: stub processes become the restored ones.

use super::stub_process::StubProcess;
use super::tree_restoration::TreeRestoration;
use crate::donor::{StublessCall, find_syscall_instruction, find_syscall_instruction_in};
use crate::error::{Error, Result};
use crate::files::FdStore;
use crate::image::{MappingBacking, MemoryMapping, ProcessState, ProcessTreeState};
use crate::procfs;
use crate::trace::Tracee;
use holdfast_sys::priority::{
    PriorityBoost, RealtimeGuard, boost_stub_thread, is_realtime, set_timer_slack_ns,
    timer_slack_ns,
};

impl TreeRestoration {
    /// Raises the priority above ordinary threads, as the original is about to be stopped: for the restorer until the
    /// tree runs, if that is permitted, and for the stub processes until they get the scheduling of their originals.
    pub fn raise_priority(&mut self) -> Result<()> {
        if self.stub_processes.is_empty() {
            return Err(Error::Image("a freeze came before the first tree"));
        }
        self.realtime_guard = RealtimeGuard::begin();
        if self.realtime_guard.is_some() {
            for tid in self
                .stub_processes
                .iter()
                .flatten()
                .flat_map(|stub_process| &stub_process.threads)
            {
                boost_stub_thread(*tid);
            }
        }
        Ok(())
    }

    /// Does as much as possible of [`TreeRestoration::resume`] before the commit. Errors are reported by `resume`.
    pub fn prepare_resume(&mut self) {
        // Record locks are taken after the commit, by stub processes that still need their stubs.
        if self.contended_locks.has_records() {
            return;
        }
        let prepared = self
            .frozen
            .as_ref()
            .map(|frozen| self.prepare_processes(frozen));
        self.resume_preparation = prepared;
    }

    /// Resumes all processes. Returns the locks that another process holds.
    pub fn resume(&mut self) -> Result<Vec<String>> {
        let frozen = self
            .frozen
            .take()
            .ok_or(Error::Image("resume requested before the state"))?;
        if let Some(store) = &mut self.fd_store {
            store.publish()?;
        }
        let lost_locks = self.take_contended_locks()?;
        self.objects.detach_segments();
        match self.resume_preparation.take() {
            Some(prepared) => prepared?,
            None => self.prepare_processes(&frozen)?,
        }
        // The restorer's copies would keep files open that the tree closes.
        self.fd_store.iter_mut().for_each(FdStore::close);
        for stub_process in self.stub_processes.drain(..).flatten() {
            for tid in stub_process.threads {
                Tracee { tid }.detach()?;
            }
        }
        for bearer in &self.group_holders {
            // SAFETY: no pointers but a null one are passed; a placeholder is the restorer's own child.
            unsafe {
                libc::kill(*bearer, libc::SIGKILL);
                libc::waitpid(*bearer, std::ptr::null_mut(), 0);
            }
        }
        Ok(lost_locks)
    }

    /// Gives all threads their registers, without resuming them.
    fn prepare_processes(&self, frozen: &ProcessTreeState) -> Result<()> {
        let pairs = self.stub_processes.iter().zip(&frozen.processes);
        let living: Vec<(&StubProcess, &ProcessState)> = pairs
            .filter_map(|(stub_process, state)| stub_process.as_ref().zip(state.as_ref()))
            .collect();
        remove_stubs(living.iter().map(|(stub_process, _)| *stub_process))?;
        for (stub_process, state) in living {
            for (tid, thread) in stub_process.threads.iter().zip(&state.threads) {
                let tracee = Tracee { tid: *tid };
                tracee.set_registers(&thread.registers)?;
                tracee.set_extended_registers(&thread.extended_registers)?;
                tracee.set_signal_mask(thread.signal_mask)?;
            }
        }
        Ok(())
    }
}

/// Unmaps the stubs of all stub processes at the same time.
fn remove_stubs<'a>(stub_processes: impl Iterator<Item = &'a StubProcess>) -> Result<()> {
    let is_urgent = is_realtime();
    let (mut pending_removals, mut outcome) = (Vec::new(), Ok(()));
    for stub_process in stub_processes {
        let call = syscall_instruction_of(stub_process).and_then(|gadget| {
            // The process has its original's priority already and must still execute one instruction.
            let slack_ns = is_urgent
                .then(|| timer_slack_ns(stub_process.pid))
                .flatten();
            let boost = is_urgent
                .then(|| PriorityBoost::begin(stub_process.pid))
                .flatten();
            let end_boost = move || {
                if let Some(loan) = boost {
                    loan.end();
                    if let Some(slack_ns) = slack_ns {
                        set_timer_slack_ns(stub_process.pid, slack_ns);
                    }
                }
            };
            match StublessCall::begin_stub_removal(
                &stub_process.stub,
                stub_process.first_thread(),
                gadget,
            ) {
                Ok(call) => Ok((call, end_boost)),
                Err(error) => {
                    end_boost();
                    Err(error)
                }
            }
        });
        match call {
            Ok(call) => pending_removals.push(call),
            Err(error) => {
                outcome = Err(error);
                break;
            }
        }
    }
    for (call, take_back) in pending_removals {
        let removed = call.finish().map(drop);
        take_back();
        outcome = outcome.and(removed);
    }
    outcome
}

/// Returns the address of an instruction `syscall` in a stub process. The vDSO has one; the other mappings are read
/// only if the vDSO has none.
fn syscall_instruction_of(stub_process: &StubProcess) -> Result<u64> {
    let is_code = |mapping: &&MemoryMapping| matches!(&mapping.backing, MappingBacking::Kernel(name) if name == "[vdso]");
    let code = stub_process.mappings.iter().find(is_code);
    let found = code.and_then(|mapping| {
        find_syscall_instruction_in(&stub_process.memory, mapping.start, mapping.end)
    });
    match found {
        Some(found) => Ok(found),
        None => {
            find_syscall_instruction(&stub_process.memory, &procfs::mappings(stub_process.pid)?)
        }
    }
}
