//! What a daemon's successor needs to finish the handoffs that were under way.
//!
//! A socket in transit survives its daemon, since its server program has the descriptor. What lies beside the socket
//! (its options, and data that was not sent yet) does not, so it is written to a file in the run directory (memory, on a
//! usual host) before the commit is asked for, and removed when the flows are active.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};

use holdfast_proto::handoff::RestoreFlow;
use holdfast_wire::Flow;
use holdfast_wire::frame::{BatchId, PrepareFlow};
use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;

/// One line of the journal.
#[derive(Debug, Serialize, Deserialize)]
enum Entry {
    Static { flow: Flow, blob: ByteBuf },
    Dynamic { flow: Flow, blob: ByteBuf },
}

/// What the journal has about a flow.
#[derive(Debug, Default, Clone)]
pub struct Journaled {
    /// A `StaticBlob`.
    pub fixed: Vec<u8>,
    /// A `DynamicBlob`; empty if the state had not come.
    pub state: Vec<u8>,
}

/// The journal of arrivals.
pub struct Journal {
    directory: PathBuf,
    files: BTreeMap<BatchId, usize>,
    batch_of: BTreeMap<Flow, BatchId>,
}

impl Journal {
    /// Opens the journal below `run_dir` and gives what an earlier daemon left in it.
    ///
    /// # Errors
    /// The directory cannot be made.
    pub fn open(run_dir: &Path) -> std::io::Result<(Self, BTreeMap<Flow, Journaled>)> {
        let directory = run_dir.join("arrivals");
        std::fs::create_dir_all(&directory)?;
        let mut found: BTreeMap<Flow, Journaled> = BTreeMap::new();
        for file in std::fs::read_dir(&directory)?.flatten() {
            read(&file.path(), &mut found);
            let _ = std::fs::remove_file(file.path());
        }
        Ok((
            Self {
                directory,
                files: BTreeMap::new(),
                batch_of: BTreeMap::new(),
            },
            found,
        ))
    }

    /// Sockets were made for these flows.
    pub fn prepared(&mut self, batch: BatchId, flows: &[PrepareFlow]) {
        let entries = flows.iter().map(|of| Entry::Static {
            flow: of.flow,
            blob: ByteBuf::from(of.static_state.to_vec()),
        });
        self.append(batch, entries);
        for of in flows {
            self.batch_of.insert(of.flow, batch);
        }
        *self.files.entry(batch).or_default() += flows.len();
    }

    /// Their state came.
    pub fn restored(&mut self, batch: BatchId, flows: &[RestoreFlow]) {
        let entries = flows.iter().map(|of| Entry::Dynamic {
            flow: of.flow,
            blob: ByteBuf::from(of.dynamic.to_vec()),
        });
        self.append(batch, entries);
    }

    /// A flow needs the journal no more.
    pub fn ended(&mut self, flow: &Flow) {
        let Some(batch) = self.batch_of.remove(flow) else {
            return;
        };
        let Some(left) = self.files.get_mut(&batch) else {
            return;
        };
        *left -= 1;
        if *left == 0 {
            self.files.remove(&batch);
            let _ = std::fs::remove_file(self.path(batch));
        }
    }

    fn path(&self, batch: BatchId) -> PathBuf {
        self.directory.join(batch.to_string())
    }

    /// A journal that cannot be written costs nothing unless the daemon dies within the next milliseconds.
    fn append(&self, batch: BatchId, entries: impl Iterator<Item = Entry>) {
        let mut bytes = Vec::new();
        for entry in entries {
            match postcard::to_stdvec_cobs(&entry) {
                Ok(line) => bytes.extend(line),
                Err(error) => tracing::warn!(%error, "a flow is not in the journal"),
            }
        }
        let file = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.path(batch));
        if let Err(error) = file.and_then(|mut file| file.write_all(&bytes)) {
            tracing::warn!(%batch, %error, "the journal of arrivals cannot be written; free space in the run directory");
        }
    }
}

/// Reads what is whole; the end may be cut off.
fn read(path: &Path, found: &mut BTreeMap<Flow, Journaled>) {
    let Ok(mut bytes) = std::fs::read(path) else {
        return;
    };
    for line in bytes.split_mut(|byte| *byte == 0) {
        // The terminating zero was taken by the split; the decoder works without it.
        match postcard::from_bytes_cobs::<Entry>(line) {
            Ok(Entry::Static { flow, blob }) => {
                found.entry(flow).or_default().fixed = blob.into_vec()
            }
            Ok(Entry::Dynamic { flow, blob }) => {
                found.entry(flow).or_default().state = blob.into_vec()
            }
            Err(_) => {}
        }
    }
}
