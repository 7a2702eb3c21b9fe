//! Husks become the processes.

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
    /// The original is about to stand still: until the tree runs the restorer is ahead of ordinary threads, where it may be, and
    /// husks are until they have the state of their processes.
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

    /// Does while nobody knows yet whether the tree will run what would have to be done then. What fails is told then.
    pub fn prepare(&mut self) {
        // Such locks are taken by husks that still have their stubs, when it is certain.
        if self.contended.has_records() {
            return;
        }
        let prepared = self.frozen.as_ref().map(|frozen| self.prepare_all(frozen));
        self.prepared = prepared;
    }

    /// Lets everything run; gives the locks that somebody else has.
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
        // What the restorer holds would keep files of the tree open that the tree closes.
        self.stock.iter_mut().for_each(Stock::close);
        for husk in self.husks.drain(..).flatten() {
            for tid in husk.threads {
                Tracee { tid }.detach()?;
            }
        }
        for bearer in &self.bearers {
            // SAFETY: no pointers but a null one are passed; a bearer is our child alone.
            unsafe {
                libc::kill(*bearer, libc::SIGKILL);
                libc::waitpid(*bearer, std::ptr::null_mut(), 0);
            }
        }
        Ok(unlocked)
    }

    /// Gives all threads their registers. Nothing runs.
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

/// Takes the stubs out of all husks at the same time.
fn remove_stubs<'a>(husks: impl Iterator<Item = &'a Husk>) -> Result<()> {
    let lends = is_realtime();
    let (mut begun, mut outcome) = (Vec::new(), Ok(()));
    for husk in husks {
        let call = call_instruction_of(husk).and_then(|gadget| {
            // It has the priority of its process by now, and steps once more.
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

/// Where in a husk the instruction `syscall` is. The kernel's code has it; what else is mapped is only asked for where that is
/// not so.
fn call_instruction_of(husk: &Husk) -> Result<u64> {
    let is_code = |of: &&Mapping| matches!(&of.backing, Backing::Kernel(name) if name == "[vdso]");
    let code = husk.mappings.iter().find(is_code);
    let found = code.and_then(|of| call_instruction_in(&husk.memory, of.start, of.end));
    match found {
        Some(found) => Ok(found),
        None => call_instruction(&husk.memory, &procfs::mappings(husk.pid)?),
    }
}
