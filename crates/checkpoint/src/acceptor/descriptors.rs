//! Open files: the restorer recreates them and passes them to the stub processes.

use super::stub_process::StubProcess;
use super::tree_restoration::TreeRestoration;
use crate::error::{Error, Result};
use crate::files::image::FileId;
use crate::files::{FdStore, FilesImageChanges, ProvidedFiles, open_slave};
use crate::image::{OpenFilesUpdate, ProcessLayout, Validate};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;

/// Most sockets passed with one message.
const SOCKETS_MAX: usize = 1 << 18;

/// Descriptors, and the numbers of the sockets whose descriptors follow the message.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct DescriptorMessage<'a> {
    pub files: Cow<'a, OpenFilesUpdate>,
    pub sockets: Vec<FileId>,
}

impl Validate for DescriptorMessage<'_> {
    fn check(&self) -> Result<()> {
        if self.sockets.len() > SOCKETS_MAX {
            return Err(Error::Image("too many sockets"));
        }
        self.files.check()
    }
}

impl TreeRestoration {
    /// Recreates the donor's open files and passes them to the stub processes. `is_final` is true once the donor is
    /// stopped.
    pub fn update_descriptors(
        &mut self,
        handed: DescriptorMessage<'_>,
        sockets: Vec<OwnedFd>,
        is_final: bool,
    ) -> Result<()> {
        self.check_not_complete()?;
        if self.stub_processes.is_empty() || self.fd_store_is_final {
            return Err(Error::Image("descriptors out of order"));
        }
        let received = ProvidedFiles {
            sockets: handed.sockets.into_iter().zip(sockets).collect(),
            memory: self.objects.take_new_shared_memory(&self.tree)?,
        };
        match (handed.files.into_owned(), &mut self.fd_store) {
            (OpenFilesUpdate::Image(image), None) => {
                let store = self.fd_store.insert(FdStore::prepare_with_rights(
                    image,
                    received,
                    self.objects.rights().clone(),
                )?);
                if is_final {
                    store.apply_final(FilesImageChanges::default(), ProvidedFiles::default())?;
                }
            }
            (OpenFilesUpdate::Changes(changes), Some(store)) if is_final => {
                store.apply_final(changes, received)?
            }
            (OpenFilesUpdate::Changes(changes), Some(store)) => {
                store.apply_snapshot(changes, received)?
            }
            _ => return Err(Error::Image("descriptors out of order")),
        }
        self.fd_store_is_final = is_final;
        let is_stale = self
            .fd_store
            .as_mut()
            .is_some_and(FdStore::take_slots_changed);
        self.fill_descriptors(is_final, is_stale)
    }

    /// Passes missing descriptors to the stub processes. If the restorer's store is not `stale`, only processes made
    /// since the last call miss any.
    fn fill_descriptors(&self, is_final: bool, stale: bool) -> Result<()> {
        let Some(store) = &self.fd_store else {
            return Ok(());
        };
        let stub_processes: HashMap<i32, &StubProcess> = self
            .living_processes()
            .map(|stub_process| (stub_process.pid, stub_process))
            .collect();
        let mut filled = Vec::new();
        let mut known = 0;
        for (number, table) in &store.image().tables {
            let sharers: Vec<&StubProcess> = table
                .pids
                .iter()
                .filter_map(|pid| stub_processes.get(pid).copied())
                .collect();
            let Some(first) = sharers.first() else {
                continue;
            };
            known += sharers.len();
            let slots = Rc::as_ptr(&first.fd_table);
            let has_other_table =
                |stub_process: &&&StubProcess| Rc::as_ptr(&stub_process.fd_table) != slots;
            if let Some(other) = sharers.iter().find(has_other_table).filter(|_| is_final) {
                return Err(sharing_changed(other.pid));
            }
            if filled.contains(&slots) {
                return Err(sharing_changed(first.pid));
            }
            filled.push(slots);
            for stub_process in &sharers {
                self.check_terminal(store, stub_process.pid)?;
            }
            // A process made since the last call has its parent's descriptors.
            let places = store.table_slots(*number);
            if stale || !first.has_descriptors(&places) {
                first.fill_descriptors(places)?;
            }
            if is_final {
                restore_own_properties(store, *number, &sharers)?;
            }
        }
        if is_final && known != stub_processes.len() {
            return Err(Error::Image(
                "descriptors do not match the tree's processes",
            ));
        }
        Ok(())
    }

    /// Checks that only a session's leader has the controlling terminal. The kernel gives the terminal to the leader
    /// and to processes forked later, so others cannot get it back.
    fn check_terminal(&self, store: &FdStore, leader: i32) -> Result<()> {
        let terminal = store.image().controlling_terminal(leader);
        let in_session = |process: &&ProcessLayout| {
            process.session == leader && process.pid != leader && process.exit_status.is_none()
        };
        match self.tree.processes.iter().find(in_session) {
            Some(other) if terminal.is_some() => Err(Error::Refused(format!(
                "process {} shares the controlling terminal of process {leader}: only a session leader can \
                 have a controlling terminal restored",
                other.pid
            ))),
            _ => Ok(()),
        }
    }

    pub(super) fn living_processes(&self) -> impl Iterator<Item = &StubProcess> {
        self.stub_processes.iter().flatten()
    }
}

/// Restores properties of descriptors that only the processes themselves can set.
fn restore_own_properties(store: &FdStore, table: u32, sharers: &[&StubProcess]) -> Result<()> {
    for (at, stub_process) in sharers.iter().enumerate() {
        if at == 0 {
            stub_process.register_epoll_entries(&store.in_process_watches(table))?;
        }
        if let Some((terminal, group)) = store.image().controlling_terminal(stub_process.pid) {
            // The terminal is opened again, as the process may have closed all of its descriptors for it.
            stub_process.set_controlling_terminal(open_slave(terminal)?.as_fd(), group)?;
        }
    }
    Ok(())
}

fn sharing_changed(pid: i32) -> Error {
    Error::Refused(format!(
        "process {pid} shares its descriptor table with different processes than before; try again"
    ))
}
