//! Reboots of hosts: everything in a host's memory ends, and the host is made anew.

use crate::{
    bring_up,
    error::{Error, Result},
    lab::Lab,
    lab_state::{LabLock, LabState},
};

impl Lab {
    /// Reboots a host without a warning, as a loss of power does. First its link goes down, so that nothing that its
    /// processes say while they die leaves the host. Then all processes are killed, and with them everything ends that
    /// exists in the host's namespaces only: interfaces, sockets, mounts, pinned eBPF objects and their programs, and the
    /// files in `/run`. A new host takes the place of the old one, with the same name, addresses, link and limits. Files
    /// outside `/run` belong to the machine, and stay. No program of the host is started again.
    ///
    /// The kernel is the machine's: its clock, boot ID and modules go on. The host can be reached again when this function
    /// returns.
    ///
    /// # Errors
    /// [`Error::NoHost`]; [`Error::Invalid`] for a host that is isolated or behind the link program, and for a lab
    /// that belongs to another process; otherwise the system's error, after which the host stays away.
    pub fn reboot(&mut self, host: &str) -> Result<()> {
        let host = self.host(host)?.clone();
        let _lock = LabLock::lock_existing(self.name())?;
        let mut state = LabState::load(self.name())?;
        let refuse = |why: &str| {
            Err(Error::Invalid(format!(
                "{} cannot be rebooted: {why}",
                host.name
            )))
        };
        if state.is_spliced(&host.name) {
            return refuse("its packets pass through the link program");
        }
        if state.cut.contains(&host.name) {
            return refuse("it is cut off; heal it before");
        }
        let mut kept = Vec::new();
        let children = match &mut self.owned_processes {
            Some(children) => children,
            None if state.keep => &mut kept,
            None => return refuse("the lab belongs to another process"),
        };
        bring_up::switch_off(&state, &host, children)?;
        let started = bring_up::switch_on(&mut state, &host, children);
        // A lab that is kept needs no owner: its hosts ignore the end of their input.
        state.save()?;
        self.state = state;
        started
    }
}
