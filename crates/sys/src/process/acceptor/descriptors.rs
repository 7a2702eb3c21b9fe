//! Open files, made in the restorer, and given to husks.

use super::husk::Husk;
use super::plan::Restoration;
use crate::process::error::{Error, Result};
use crate::process::files::image::FileId;
use crate::process::files::{Changes, Given, Stock};
use crate::process::image::{Checked, Files};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::rc::Rc;

/// Most sockets that are handed over with one message.
const SOCKETS_MAX: usize = 1 << 18;

/// Descriptors, with the numbers of the sockets that are handed over behind the message.
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
    /// Makes open files as they are at the donor, and gives them to the husks; `last` when the donor stands still.
    pub fn descriptors(
        &mut self,
        handed: Handed<'_>,
        sockets: Vec<OwnedFd>,
        last: bool,
    ) -> Result<()> {
        if self.husks.is_empty() || self.stock_is_final {
            return Err(Error::Image("descriptors out of order"));
        }
        let given = Given {
            sockets: handed.sockets.into_iter().zip(sockets).collect(),
            memory: self.objects.fresh_memory(&self.tree)?,
        };
        match (handed.files.into_owned(), &mut self.stock) {
            (Files::Image(image), None) => {
                let stock = self.stock.insert(Stock::prepare(image, given)?);
                if last {
                    stock.finish(Changes::default(), Given::default())?;
                }
            }
            (Files::Changes(changes), Some(stock)) if last => stock.finish(changes, given)?,
            (Files::Changes(changes), Some(stock)) => stock.follow(changes, given)?,
            _ => return Err(Error::Image("descriptors out of order")),
        }
        self.stock_is_final = last;
        self.fill_husks(last)
    }

    fn fill_husks(&self, last: bool) -> Result<()> {
        let Some(stock) = &self.stock else {
            return Ok(());
        };
        if last {
            stock.complete()?;
        }
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
            first.fill(stock.places(*number))?;
            if last {
                complete(stock, *number, &sharers)?;
            }
        }
        if last && known != husks.len() {
            return Err(Error::Image("descriptors of other processes"));
        }
        Ok(())
    }

    pub(super) fn living(&self) -> impl Iterator<Item = &Husk> {
        self.husks.iter().flatten()
    }
}

/// What only the processes themselves can do with their descriptors.
fn complete(stock: &Stock, table: u32, sharers: &[&Husk]) -> Result<()> {
    for (at, husk) in sharers.iter().enumerate() {
        if at == 0 {
            husk.watch_again(&stock.own_watches(table))?;
        }
        if let Some((fd, group)) = stock.image().controlling_terminal(table, husk.pid) {
            husk.take_terminal(fd, group)?;
        }
    }
    Ok(())
}

fn shared_otherwise(pid: i32) -> Error {
    Error::Refused(format!(
        "process {pid} shares its descriptors with others than before; try again"
    ))
}
