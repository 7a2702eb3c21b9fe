//! Open files: the restorer recreates them and passes them to the empty processes.

use super::husk::Husk;
use super::plan::Restoration;
use crate::process::error::{Error, Result};
use crate::process::files::image::FileId;
use crate::process::files::{Changes, Given, Stock, open_slave};
use crate::process::image::{Checked, Files, Process};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;

/// Most sockets passed with one message.
const SOCKETS_MAX: usize = 1 << 18;

/// Descriptors, and the numbers of the sockets whose descriptors follow the message.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Handed<'a> {
    pub files: Cow<'a, Files>,
    pub sockets: Vec<FileId>,
}

impl Checked for Handed<'_> {
    fn check(&self) -> Result<()> {
        if self.sockets.len() > SOCKETS_MAX {
            return Err(Error::Image("number of sockets"));
        }
        self.files.check()
    }
}

impl Restoration {
    /// Recreates the donor's open files and passes them to the empty processes. `last` is true once the donor is
    /// stopped.
    pub fn descriptors(
        &mut self,
        handed: Handed<'_>,
        sockets: Vec<OwnedFd>,
        last: bool,
    ) -> Result<()> {
        self.is_open()?;
        if self.husks.is_empty() || self.stock_is_final {
            return Err(Error::Image("descriptors out of order"));
        }
        let given = Given {
            sockets: handed.sockets.into_iter().zip(sockets).collect(),
            memory: self.objects.fresh_memory(&self.tree)?,
        };
        match (handed.files.into_owned(), &mut self.stock) {
            (Files::Image(image), None) => {
                let stock = self.stock.insert(Stock::prepare_for(
                    image,
                    given,
                    self.objects.rights().clone(),
                )?);
                if last {
                    stock.finish(Changes::default(), Given::default())?;
                }
            }
            (Files::Changes(changes), Some(stock)) if last => stock.finish(changes, given)?,
            (Files::Changes(changes), Some(stock)) => stock.follow(changes, given)?,
            _ => return Err(Error::Image("descriptors out of order")),
        }
        self.stock_is_final = last;
        let stale = self.stock.as_mut().is_some_and(Stock::take_stale);
        self.fill_husks(last, stale)
    }

    /// Passes missing descriptors to the empty processes. If the restorer's store is not `stale`, only processes made
    /// since the last call miss any.
    fn fill_husks(&self, last: bool, stale: bool) -> Result<()> {
        let Some(stock) = &self.stock else {
            return Ok(());
        };
        let husks: HashMap<i32, &Husk> = self.living().map(|husk| (husk.pid, husk)).collect();
        let mut filled = Vec::new();
        let mut known = 0;
        for (number, table) in &stock.image().tables {
            let sharers: Vec<&Husk> = table
                .pids
                .iter()
                .filter_map(|pid| husks.get(pid).copied())
                .collect();
            let Some(first) = sharers.first() else {
                continue;
            };
            known += sharers.len();
            let slots = Rc::as_ptr(&first.slots);
            let apart = |husk: &&&Husk| Rc::as_ptr(&husk.slots) != slots;
            if let Some(other) = sharers.iter().find(apart).filter(|_| last) {
                return Err(shared_otherwise(other.pid));
            }
            if filled.contains(&slots) {
                return Err(shared_otherwise(first.pid));
            }
            filled.push(slots);
            for husk in &sharers {
                self.check_terminal(stock, husk.pid)?;
            }
            // A process made since the last call has its parent's descriptors.
            let places = stock.places(*number);
            if stale || !first.has(&places) {
                first.fill(places)?;
            }
            if last {
                complete(stock, *number, &sharers)?;
            }
        }
        if last && known != husks.len() {
            return Err(Error::Image("descriptors of other processes"));
        }
        Ok(())
    }

    /// Checks that only a session's leader has the controlling terminal. The kernel gives the terminal to the leader
    /// and to processes forked later, so others cannot get it back.
    fn check_terminal(&self, stock: &Stock, leader: i32) -> Result<()> {
        let terminal = stock.image().controlling_terminal(leader);
        let in_session = |process: &&Process| {
            process.session == leader && process.pid != leader && process.exit_status.is_none()
        };
        match self.tree.processes.iter().find(in_session) {
            Some(other) if terminal.is_some() => Err(Error::Refused(format!(
                "process {} shares the controlling terminal of process {leader}: only the leader of a session can \
                 get one back",
                other.pid
            ))),
            _ => Ok(()),
        }
    }

    pub(super) fn living(&self) -> impl Iterator<Item = &Husk> {
        self.husks.iter().flatten()
    }
}

/// Restores properties of descriptors that only the processes themselves can set.
fn complete(stock: &Stock, table: u32, sharers: &[&Husk]) -> Result<()> {
    for (at, husk) in sharers.iter().enumerate() {
        if at == 0 {
            husk.watch_again(&stock.own_watches(table))?;
        }
        if let Some((terminal, group)) = stock.image().controlling_terminal(husk.pid) {
            // The terminal is opened again, as the process may have closed all of its descriptors for it.
            husk.take_terminal(open_slave(terminal)?.as_fd(), group)?;
        }
    }
    Ok(())
}

fn shared_otherwise(pid: i32) -> Error {
    Error::Refused(format!(
        "process {pid} shares its descriptors with others than before; try again"
    ))
}
