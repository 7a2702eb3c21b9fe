//! The load of this node and its processes: samples, smoothed.

use core::time::Duration;
use holdfast_wire::conductor_frames::{NodeDemand, ProcessKey};
use holdfast_wire::failure::Failure;

/// The load of this node at one time, as the daemon measures it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LoadSample {
    /// Load of the whole node.
    pub demand: NodeDemand,
    /// Memory that moved processes may use, in KiB.
    pub memory_free_kib: u64,
    /// The managed processes.
    pub processes: Vec<ProcessSample>,
}

/// The load of one managed process at one time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessSample {
    /// Number that identifies the process in the group, also when it moves.
    pub key: ProcessKey,
    /// Processor time that the process demands, in thousandths of a processor.
    pub used: u32,
    /// Memory that the process uses, in KiB.
    pub memory_kib: u64,
    /// Number of clients of the process.
    pub clients: u32,
    /// Predicted freeze of a move of the process.
    pub freeze: Duration,
    /// The operator's rules for placing the process.
    pub rules: PlacementRules,
    /// Reason for which the process cannot move, if any.
    pub blocked: Option<Failure>,
}

/// An operator's rules for one process. Labels are numbers that all nodes give to equal texts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PlacementRules {
    /// True if the process stays at its node, also when the node is drained.
    pub is_pinned: bool,
    /// Affinity: processes with the same label stay together. Balancing does not part them, and a drain sends them to one
    /// node if that has room.
    pub affinity_label: Option<u64>,
    /// Anti-affinity: no two processes with the same label run at one node.
    pub anti_affinity_label: Option<u64>,
}

/// A value smoothed over time, and its mean deviation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Smoothed {
    mean: f64,
    deviation: f64,
    at: Duration,
}

impl Smoothed {
    pub fn new(now: Duration, mean: f64, deviation: f64) -> Smoothed {
        Smoothed {
            mean,
            deviation,
            at: now,
        }
    }

    /// Takes a sample. The weight of earlier ones falls with the time since the last.
    pub fn update(&mut self, now: Duration, value: f64, time_constant: Duration) {
        let elapsed = now.saturating_sub(self.at).as_secs_f64();
        let weight = elapsed / (elapsed + time_constant.as_secs_f64()).max(f64::MIN_POSITIVE);
        let difference = value - self.mean;
        self.mean += weight * difference;
        self.deviation += weight * (difference.abs() - self.deviation);
        self.at = now;
    }

    /// Takes a known change into account that samples will show later.
    pub fn shift(&mut self, by: f64) {
        self.mean = (self.mean + by).max(0.0);
    }

    pub fn mean(&self) -> f64 {
        self.mean
    }

    pub fn deviation(&self) -> f64 {
        self.deviation
    }
}

/// A process of this node.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ProcessLoad {
    pub used: Smoothed,
    pub sample: ProcessSample,
}

/// The load of this node.
#[derive(Debug, Default)]
pub(super) struct OwnLoad {
    used: Option<Smoothed>,
    capacity: u32,
    pub memory_free_kib: u64,
    /// The processes, in the order of their keys.
    processes: Vec<ProcessLoad>,
}

impl OwnLoad {
    /// Takes a sample. Processes that came or went change the smoothed load at once. `expected` returns the load that a new
    /// process had at its former node.
    pub fn update(
        &mut self,
        now: Duration,
        sample: LoadSample,
        smoothing: Duration,
        expected: impl Fn(ProcessKey) -> Option<Smoothed>,
    ) {
        let used = f64::from(sample.demand.used);
        let is_first = self.used.is_none();
        let mut own = self.used.unwrap_or(Smoothed::new(now, used, 0.0));
        self.capacity = sample.demand.capacity;
        self.memory_free_kib = sample.memory_free_kib;
        let mut samples = sample.processes;
        samples.sort_unstable_by_key(|process| process.key);
        let (arrived, departed) = self.update_known(now, samples, smoothing);
        for sample in arrived {
            let measured = f64::from(sample.used);
            let mut used = expected(sample.key).unwrap_or(Smoothed::new(now, measured, 0.0));
            if !is_first {
                own.shift(used.mean);
            }
            used.update(now, measured, smoothing);
            if let Err(position) = self.position(sample.key) {
                self.processes
                    .insert(position, ProcessLoad { used, sample });
            }
        }
        for process in departed {
            own.shift(-process.mean);
        }
        own.update(now, used, smoothing);
        self.used = Some(own);
    }

    /// Updates the known processes in place from samples in the order of their keys, and drops processes without a sample.
    /// Returns the samples of other processes, and the loads of the dropped ones.
    fn update_known(
        &mut self,
        now: Duration,
        samples: Vec<ProcessSample>,
        smoothing: Duration,
    ) -> (Vec<ProcessSample>, Vec<Smoothed>) {
        let (mut arrived, mut departed) = (Vec::new(), Vec::new());
        let mut samples = samples.into_iter().peekable();
        self.processes.retain_mut(|process| {
            let key = process.sample.key;
            while let Some(sample) = samples.next_if(|sample| sample.key < key) {
                arrived.push(sample);
            }
            let Some(sample) = samples.next_if(|sample| sample.key == key) else {
                departed.push(process.used);
                return false;
            };
            process.used.update(now, f64::from(sample.used), smoothing);
            process.sample = sample;
            true
        });
        arrived.extend(samples);
        (arrived, departed)
    }

    /// Returns the processes in the order of their keys.
    pub fn processes(&self) -> &[ProcessLoad] {
        &self.processes
    }

    /// Returns a process of this node.
    pub fn process(&self, key: ProcessKey) -> Option<&ProcessLoad> {
        let position = self.position(key).ok()?;
        self.processes.get(position)
    }

    /// Returns the position of a process, or the position at which to insert it.
    fn position(&self, key: ProcessKey) -> Result<usize, usize> {
        self.processes
            .binary_search_by_key(&key, |process| process.sample.key)
    }

    /// Returns the smoothed load; none before the first sample, or if the last one is older than `freshness`.
    pub fn demand(&self, now: Duration, freshness: Duration) -> Option<NodeDemand> {
        let used = self
            .used
            .filter(|used| now.saturating_sub(used.at) <= freshness)?;
        Some(NodeDemand {
            // A float-to-integer conversion saturates.
            used: used.mean.round() as u32,
            capacity: self.capacity,
        })
    }

    /// Returns the capacity in the last sample, in thousandths of a processor.
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Returns the time of the last sample.
    pub fn measured_at(&self) -> Option<Duration> {
        self.used.map(|used| used.at)
    }

    /// Adds a process that arrived, until a sample shows it.
    pub fn add(&mut self, process: ProcessLoad) {
        if let (Err(position), Some(own)) = (self.position(process.sample.key), &mut self.used) {
            own.shift(process.used.mean);
            let memory_kib = process.sample.memory_kib;
            self.memory_free_kib = self.memory_free_kib.saturating_sub(memory_kib);
            self.processes.insert(position, process);
        }
    }

    /// Takes off a process that left.
    pub fn remove(&mut self, key: ProcessKey) {
        if let (Ok(position), Some(own)) = (self.position(key), &mut self.used) {
            own.shift(-self.processes.remove(position).used.mean);
        }
    }

    /// Returns true if a process with this anti-affinity label runs here.
    pub fn has_anti_affinity_label(&self, label: u64) -> bool {
        let mut labels = self
            .processes
            .iter()
            .map(|process| process.sample.rules.anti_affinity_label);
        labels.any(|known| known == Some(label))
    }
}
