//! Journal of arrivals, with which the next daemon finishes handoffs that were in progress.
//!
//! A socket in transit survives its daemon, because its server program has the descriptor. State outside the socket
//! (its options, and data not yet sent) does not. Such state is written to a file in the run directory (in memory on a
//! usual host) before the commit is requested, and removed when the flows are active.

use std::collections::{BTreeMap, HashMap};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use holdfast_daemon::private_files::{self, private_directory};
use holdfast_proto::handoff::FlowToRestore;
use holdfast_wire::Flow;
use holdfast_wire::frame::{BatchId, FlowToPrepare};
use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;

/// An entry in the journal of arriving flows.
#[derive(Debug, Serialize, Deserialize)]
enum JournalEntry {
    Static { flow: Flow, blob: ByteBuf },
    Dynamic { flow: Flow, blob: ByteBuf },
}

/// Journaled state of a flow.
#[derive(Debug, Default, Clone)]
pub struct JournaledFlow {
    /// An encoded `StaticBlob`.
    pub static_blob: Vec<u8>,
    /// An encoded `DynamicBlob`; empty if the donor had not sent it.
    pub dynamic_blob: Vec<u8>,
}

/// The journal of arrivals.
pub struct ArrivalJournal {
    directory: PathBuf,
    /// Number of flows that need each file, by file name.
    file_users: HashMap<Rc<str>, usize>,
    file_of: HashMap<Flow, Rc<str>>,
    /// State written by an earlier daemon.
    earlier: BTreeMap<Flow, JournaledFlow>,
}

impl ArrivalJournal {
    /// Opens the journal below `run_dir`, with the entries of an earlier daemon.
    ///
    /// # Errors
    /// The directory cannot be made.
    pub fn open(run_dir: &Path) -> std::io::Result<Self> {
        let directory = run_dir.join("arrivals");
        private_directory(&directory)?;
        let mut journal = Self {
            directory: directory.clone(),
            file_users: HashMap::new(),
            file_of: HashMap::new(),
            earlier: BTreeMap::new(),
        };
        for file in std::fs::read_dir(&directory)?.flatten() {
            let mut found = BTreeMap::new();
            read_entries(&file.path(), &mut found);
            let name: Rc<str> = file.file_name().into_string().unwrap_or_default().into();
            if found.is_empty() {
                let _ = std::fs::remove_file(file.path());
            }
            // The files stay until their flows have ended, because this daemon may die too.
            for (flow, journaled) in found {
                journal.remove(&flow);
                journal.add_file_user(flow, &name);
                journal.earlier.insert(flow, journaled);
            }
        }
        Ok(journal)
    }

    /// Returns the flows of an earlier daemon.
    pub fn earlier_flows(&self) -> Vec<Flow> {
        self.earlier.keys().copied().collect()
    }

    /// Returns true if an earlier daemon wrote an entry for this flow.
    pub fn has_earlier(&self, flow: &Flow) -> bool {
        self.earlier.contains_key(flow)
    }

    /// Returns an earlier daemon's entry for a flow, without taking it.
    pub fn peek(&self, flow: &Flow) -> Option<&JournaledFlow> {
        self.earlier.get(flow)
    }

    /// Takes an earlier daemon's entry for a flow.
    pub fn take_earlier_flow(&mut self, flow: &Flow) -> JournaledFlow {
        self.earlier.remove(flow).unwrap_or_default()
    }

    fn add_file_user(&mut self, flow: Flow, file: &Rc<str>) {
        self.file_of.insert(flow, file.clone());
        *self.file_users.entry(file.clone()).or_default() += 1;
    }

    /// Records the static state of prepared sockets.
    pub fn record_static(&mut self, batch: BatchId, flows: &[FlowToPrepare]) {
        let entries = flows.iter().map(|prepare| JournalEntry::Static {
            flow: prepare.flow,
            blob: ByteBuf::from(prepare.static_state.to_vec()),
        });
        self.append(batch, entries);
        let file: Rc<str> = batch.to_string().into();
        for prepare in flows {
            self.remove(&prepare.flow);
            self.add_file_user(prepare.flow, &file);
        }
    }

    /// Records the dynamic state of restored sockets.
    pub fn record_dynamic(&mut self, batch: BatchId, flows: &[FlowToRestore]) {
        let entries = flows.iter().map(|restore| JournalEntry::Dynamic {
            flow: restore.flow,
            blob: ByteBuf::from(restore.dynamic.to_vec()),
        });
        self.append(batch, entries);
    }

    /// Drops a flow's entry. Its file is deleted with the last flow.
    pub fn remove(&mut self, flow: &Flow) {
        let Some(file) = self.file_of.remove(flow) else {
            return;
        };
        let Some(users) = self.file_users.get_mut(&file) else {
            return;
        };
        *users -= 1;
        if *users == 0 {
            let _ = std::fs::remove_file(self.directory.join(&*file));
            self.file_users.remove(&file);
        }
    }

    fn batch_path(&self, batch: BatchId) -> PathBuf {
        self.directory.join(batch.to_string())
    }

    /// Appends entries to a batch's file. A failed write matters only if the daemon dies within the next few
    /// milliseconds.
    fn append(&self, batch: BatchId, entries: impl Iterator<Item = JournalEntry>) {
        let mut bytes = Vec::new();
        for entry in entries {
            match postcard::to_stdvec_cobs(&entry) {
                Ok(encoded) => bytes.extend(encoded),
                Err(error) => tracing::warn!(%error, "cannot encode a flow for the journal"),
            }
        }
        let file = private_files::private_options()
            .create(true)
            .append(true)
            .open(self.batch_path(batch));
        if let Err(error) = file.and_then(|mut file| file.write_all(&bytes)) {
            tracing::warn!(%batch, %error, "the journal of arrivals cannot be written; free space in the run directory");
        }
    }
}

/// Reads the complete entries of a file, whose end may be cut off.
fn read_entries(path: &Path, found: &mut BTreeMap<Flow, JournaledFlow>) {
    let mut bytes = Vec::new();
    let opened = private_files::private_options().read(true).open(path);
    if opened
        .and_then(|mut file| file.read_to_end(&mut bytes))
        .is_err()
    {
        return;
    }
    for encoded in bytes.split_mut(|byte| *byte == 0) {
        // The split removed the terminating zero, and the decoder works without it.
        match postcard::from_bytes_cobs::<JournalEntry>(encoded) {
            Ok(JournalEntry::Static { flow, blob }) => {
                found.entry(flow).or_default().static_blob = blob.into_vec()
            }
            Ok(JournalEntry::Dynamic { flow, blob }) => {
                found.entry(flow).or_default().dynamic_blob = blob.into_vec()
            }
            Err(_) => {}
        }
    }
}
