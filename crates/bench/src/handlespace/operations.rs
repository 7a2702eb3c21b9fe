//! The eight measurements of a pool size: each operation at steady size, on elements in random order.

use std::hint::black_box;
use std::time::Duration;

use holdfast_handlespace::AnnouncedOperation;
use holdfast_wire::rserpool::ElementId;

use super::batch_times::BatchTimes;
use super::handlespace_under_test::{HandlespaceUnderTest, OperationInput};
use super::workload::{PolicyName, Workload};

/// Operations, in the order of measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "snake_case")]
#[clap(rename_all = "snake_case")]
pub enum HandlespaceOperation {
    /// Add a new element, and set its timer.
    Register,
    /// Remove an element.
    Deregister,
    /// Register an element again, with another load or weight if its policy has one.
    Reregister,
    /// Restart an element's timer before it expires.
    TimerRestart,
    /// Take the first timer and set it again.
    TimerExpire,
    /// Select one element.
    #[value(name = "resolve_1")]
    #[serde(rename = "resolve_1")]
    Resolve1,
    /// Select three elements.
    #[value(name = "resolve_3")]
    #[serde(rename = "resolve_3")]
    Resolve3,
    /// Walk through all elements; counted by element.
    Synchronize,
}

/// Life of an element's timer.
const TIMER_LIFE: Duration = Duration::from_secs(30);
/// Operations per batch, but at most one eighth of the elements.
const BATCH_MAX: usize = 4096;

/// A handlespace with its workload.
pub struct HandlespaceBench {
    subject: HandlespaceUnderTest,
    workload: Workload,
    elements: usize,
    now: Duration,
}

impl HandlespaceBench {
    /// Registers all elements, with timers spread evenly over their lives, and ages the handlespace.
    pub fn new(policy: PolicyName, elements: u32, pools: u32) -> HandlespaceBench {
        let mut workload = Workload::new(policy, elements, pools);
        let mut subject = HandlespaceUnderTest::new(pools);
        let all_inputs = subject.inputs(&workload.all_members());
        for (input, index) in all_inputs.iter().zip(0..) {
            subject.register_with_timer(input, TIMER_LIFE * index / elements);
        }
        drop(all_inputs);
        let mut bench = HandlespaceBench {
            subject,
            workload,
            elements: elements as usize,
            now: Duration::ZERO,
        };
        // Ageing puts the elements, which were registered in order, out of order in memory.
        for _ in 0..elements {
            bench.now = bench.subject.expire_timer(TIMER_LIFE);
        }
        for _ in 0..2 * (elements as usize / bench.batch_len()) {
            let (mut register, mut deregister) = (BatchTimes::default(), BatchTimes::default());
            bench.register_and_deregister_batch(&mut register, &mut deregister);
        }
        bench
    }

    /// Returns the memory per element, bytes.
    pub fn bytes_per_element(&self) -> f64 {
        self.subject.bytes_per_element()
    }

    /// Measures an operation for `duration`.
    pub fn measure(&mut self, operation: HandlespaceOperation, duration: Duration) -> BatchTimes {
        match operation {
            HandlespaceOperation::Register => self.register_and_deregister(duration).0,
            HandlespaceOperation::Deregister => self.register_and_deregister(duration).1,
            HandlespaceOperation::Reregister => self.reregister(duration),
            HandlespaceOperation::TimerRestart => self.timer_restart(duration),
            HandlespaceOperation::TimerExpire => self.timer_expire(duration),
            HandlespaceOperation::Resolve1 => self.resolve(duration, 1),
            HandlespaceOperation::Resolve3 => self.resolve(duration, 3),
            HandlespaceOperation::Synchronize => self.synchronize(duration),
        }
    }

    fn batch_len(&self) -> usize {
        BATCH_MAX.min(self.elements / 8).max(1)
    }

    /// Returns inputs for the next elements, each with new policy values.
    fn next_inputs(&mut self) -> Vec<OperationInput> {
        let batch = self.workload.next_batch(self.batch_len());
        self.subject.inputs(&batch)
    }

    /// Removes elements and adds as many, in turns.
    fn register_and_deregister(&mut self, duration: Duration) -> (BatchTimes, BatchTimes) {
        let (mut register, mut deregister) = (BatchTimes::default(), BatchTimes::default());
        while !register.has_lasted(duration) || !deregister.has_lasted(duration) {
            self.register_and_deregister_batch(&mut register, &mut deregister);
        }
        (register, deregister)
    }

    fn register_and_deregister_batch(
        &mut self,
        register: &mut BatchTimes,
        deregister: &mut BatchTimes,
    ) {
        let leaving = self.workload.next_batch(self.batch_len());
        let inputs = self.subject.inputs(&leaving);
        deregister.time_batch(leaving.len(), || {
            let kind = AnnouncedOperation::Deregistration;
            with_announcements(
                &mut self.subject,
                &inputs,
                kind,
                HandlespaceUnderTest::deregister,
            );
        });
        let joining = self.workload.replace_batch(&leaving);
        let come = self.subject.inputs(&joining);
        let step = TIMER_LIFE / come.len() as u32;
        let mut at = self.now;
        register.time_batch(come.len(), || {
            let kind = AnnouncedOperation::Registration;
            with_announcements(&mut self.subject, &come, kind, |subject, input| {
                at += step;
                subject.register_with_timer(input, at);
            });
        });
    }

    fn reregister(&mut self, duration: Duration) -> BatchTimes {
        let mut samples = BatchTimes::default();
        while !samples.has_lasted(duration) {
            let batch = self.next_inputs();
            samples.time_batch(batch.len(), || {
                let kind = AnnouncedOperation::Registration;
                with_announcements(&mut self.subject, &batch, kind, |subject, input| {
                    subject.register(input);
                });
            });
        }
        samples
    }

    /// Measures timer restarts. Each timer is restarted three times in its life on average, so none expires. The time
    /// advances, and with it the work that a restart defers: the first lives are not counted.
    fn timer_restart(&mut self, duration: Duration) -> BatchTimes {
        let mut samples = BatchTimes::default();
        let step = TIMER_LIFE / 3 / self.elements as u32;
        for input in self.subject.inputs(&self.workload.all_members()) {
            self.subject
                .restart_timer(&input, Duration::ZERO, self.now + TIMER_LIFE);
        }
        let mut settling_operations = 3 * self.elements;
        while !samples.has_lasted(duration) {
            let batch = self.next_inputs();
            let mut now = self.now;
            samples.time_batch(batch.len(), || {
                let kind = AnnouncedOperation::Timer;
                with_announcements(&mut self.subject, &batch, kind, |subject, input| {
                    now += step;
                    subject.restart_timer(input, now, now + TIMER_LIFE);
                });
            });
            self.now = now;
            if settling_operations > 0 {
                settling_operations = settling_operations.saturating_sub(batch.len());
                samples = BatchTimes::default();
            }
        }
        samples
    }

    fn timer_expire(&mut self, duration: Duration) -> BatchTimes {
        let mut samples = BatchTimes::default();
        let len = self.batch_len();
        for _ in 0..self.elements {
            self.now = self.subject.expire_timer(TIMER_LIFE);
        }
        while !samples.has_lasted(duration) {
            let mut now = self.now;
            samples.time_batch(len, || {
                for _ in 0..len {
                    now = self.subject.expire_timer(TIMER_LIFE);
                }
            });
            self.now = now;
        }
        samples
    }

    fn resolve(&mut self, duration: Duration, items: usize) -> BatchTimes {
        let mut samples = BatchTimes::default();
        let mut buffer = [0; 3];
        while !samples.has_lasted(duration) {
            let pools = self.workload.random_pools(BATCH_MAX);
            let handles = self.subject.handles(pools.into_iter());
            let announcement = |place: usize| {
                let handle = handles.get(place)?;
                Some(AnnouncedOperation::Resolution(&handle.0, items))
            };
            samples.time_batch(handles.len(), || {
                for ahead in 0..HandlespaceUnderTest::ANNOUNCE_DISTANCE {
                    self.subject.announce(announcement(ahead));
                }
                for (index, handle) in handles.iter().enumerate() {
                    self.subject.announce(announcement(
                        index + HandlespaceUnderTest::ANNOUNCE_DISTANCE,
                    ));
                    self.subject.resolve(handle, &mut buffer, items);
                    black_box(&buffer);
                }
            });
        }
        samples
    }

    fn synchronize(&mut self, duration: Duration) -> BatchTimes {
        let mut samples = BatchTimes::default();
        while !samples.has_lasted(duration) {
            samples.time_batch(self.elements, || {
                assert_eq!(self.subject.synchronize(), self.elements);
            });
        }
        samples
    }
}

/// Calls `operate` for each input of a batch, and announces inputs of this kind some operations ahead.
#[inline]
fn with_announcements<'a>(
    subject: &mut HandlespaceUnderTest,
    batch: &'a [OperationInput],
    kind: fn(&'a [u8], ElementId) -> AnnouncedOperation<'a>,
    mut operate: impl FnMut(&mut HandlespaceUnderTest, &OperationInput),
) {
    let announcement = |place: usize| batch.get(place).map(|input| input.announcement(kind));
    for ahead in 0..HandlespaceUnderTest::ANNOUNCE_DISTANCE {
        subject.announce(announcement(ahead));
    }
    for (index, input) in batch.iter().enumerate() {
        subject.announce(announcement(
            index + HandlespaceUnderTest::ANNOUNCE_DISTANCE,
        ));
        operate(subject, input);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum;

    /// Each operation works with every policy, and none changes the number of elements.
    #[test]
    fn every_operation_keeps_the_element_count() {
        for &policy in PolicyName::value_variants() {
            let mut bench = HandlespaceBench::new(policy, 300, 7);
            for &operation in HandlespaceOperation::value_variants() {
                let samples = bench.measure(operation, Duration::from_micros(1));
                assert!(samples.per_second() > 0.0);
                assert_eq!(bench.subject.synchronize(), 300);
            }
        }
    }
}
