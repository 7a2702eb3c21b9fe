//! Resuming: empty processes become the restored ones.

use super::husk::Husk;
use super::plan::Restoration;
use crate::priority::{Hurry, Loan, hurry_husk, is_realtime, set_timer_slack_ns, timer_slack_ns};
use crate::process::donor::{LoneCall, call_instruction, call_instruction_in};
use crate::process::error::{Error, Result};
use crate::process::files::Stock;
use crate::process::image::{Backing, Frozen, FrozenProcess, Mapping};
use crate::process::procfs;
use crate::process::trace::Tracee;

impl Restoration {
    /// Raises the priority above ordinary threads, as the original is about to be stopped: for the restorer until the
    /// tree runs, if that is permitted, and for the empty processes until they get the scheduling of their originals.
    pub fn hurry(&mut self) -> Result<()> {
        if self.husks.is_empty() {
            return Err(Error::Image("a freeze before the first tree"));
        }
        self.hurry = Hurry::begin();
        if self.hurry.is_some() {
            for tid in self.husks.iter().flatten().flat_map(|husk| &husk.threads) {
                hurry_husk(*tid);
            }
        }
        Ok(())
    }

    /// Does as much as possible of [`Restoration::go`] before the commit. Errors are reported by `go`.
    pub fn prepare(&mut self) {
        // Record locks are taken after the commit, by empty processes that still need their stubs.
        if self.contended.has_records() {
            return;
        }
        let prepared = self.frozen.as_ref().map(|frozen| self.prepare_all(frozen));
        self.prepared = prepared;
    }

    /// Resumes all processes. Returns the locks that another process holds.
    pub fn go(&mut self) -> Result<Vec<String>> {
        let frozen = self.frozen.take().ok_or(Error::Image("go without state"))?;
        if let Some(stock) = &mut self.stock {
            stock.publish()?;
        }
        let unlocked = self.take_contended()?;
        self.objects.let_go();
        match self.prepared.take() {
            Some(prepared) => prepared?,
            None => self.prepare_all(&frozen)?,
        }
        // The restorer's copies would keep files open that the tree closes.
        self.stock.iter_mut().for_each(Stock::close);
        for husk in self.husks.drain(..).flatten() {
            for tid in husk.threads {
                Tracee { tid }.detach()?;
            }
        }
        for bearer in &self.bearers {
            // SAFETY: no pointers but a null one are passed; a placeholder is the restorer's own child.
            unsafe {
                libc::kill(*bearer, libc::SIGKILL);
                libc::waitpid(*bearer, std::ptr::null_mut(), 0);
            }
        }
        Ok(unlocked)
    }

    /// Gives all threads their registers, without resuming them.
    fn prepare_all(&self, frozen: &Frozen) -> Result<()> {
        let pairs = self.husks.iter().zip(&frozen.processes);
        let living: Vec<(&Husk, &FrozenProcess)> = pairs
            .filter_map(|(husk, state)| husk.as_ref().zip(state.as_ref()))
            .collect();
        remove_stubs(living.iter().map(|(husk, _)| *husk))?;
        for (husk, state) in living {
            for (tid, thread) in husk.threads.iter().zip(&state.threads) {
                let tracee = Tracee { tid: *tid };
                tracee.set_registers(&thread.registers)?;
                tracee.set_extended(&thread.extended)?;
                tracee.set_mask(thread.mask)?;
            }
        }
        Ok(())
    }
}

/// Unmaps the stubs of all empty processes at the same time.
fn remove_stubs<'a>(husks: impl Iterator<Item = &'a Husk>) -> Result<()> {
    let lends = is_realtime();
    let (mut begun, mut outcome) = (Vec::new(), Ok(()));
    for husk in husks {
        let call = call_instruction_of(husk).and_then(|gadget| {
            // The process has its original's priority already and must still execute one instruction.
            let slack_ns = lends.then(|| timer_slack_ns(husk.pid)).flatten();
            let loan = lends.then(|| Loan::begin(husk.pid)).flatten();
            let take_back = move || {
                if let Some(loan) = loan {
                    loan.end();
                    if let Some(slack_ns) = slack_ns {
                        set_timer_slack_ns(husk.pid, slack_ns);
                    }
                }
            };
            match LoneCall::remove(&husk.stub, husk.first(), gadget) {
                Ok(call) => Ok((call, take_back)),
                Err(error) => {
                    take_back();
                    Err(error)
                }
            }
        });
        match call {
            Ok(call) => begun.push(call),
            Err(error) => {
                outcome = Err(error);
                break;
            }
        }
    }
    for (call, take_back) in begun {
        let removed = call.finish().map(drop);
        take_back();
        outcome = outcome.and(removed);
    }
    outcome
}

/// Returns the address of an instruction `syscall` in an empty process. The vDSO has one; the other mappings are read
/// only if the vDSO has none.
fn call_instruction_of(husk: &Husk) -> Result<u64> {
    let is_code = |of: &&Mapping| matches!(&of.backing, Backing::Kernel(name) if name == "[vdso]");
    let code = husk.mappings.iter().find(is_code);
    let found = code.and_then(|of| call_instruction_in(&husk.memory, of.start, of.end));
    match found {
        Some(found) => Ok(found),
        None => call_instruction(&husk.memory, &procfs::mappings(husk.pid)?),
    }
}
