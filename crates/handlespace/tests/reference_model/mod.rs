//! The model: one vector of elements, with each policy implemented literally from RFC 5356 and paper 001.

use holdfast_wire::rserpool::Policy;

pub struct Element {
    pub pool: usize,
    pub id: u32,
    pub home: u32,
    pub class: u32,
    pub policy: Policy,
    pub payload: usize,
    timer: Option<u64>,
    sequence: u64,
    selections: u64,
    /// Weighted round robin: completed rounds, and used turns of the current round.
    round: u64,
    turns: u64,
}

#[derive(Default)]
pub struct ReferenceModel {
    pub elements: Vec<Element>,
}

pub const POLICIES: usize = 12;

/// Returns a deterministic policy of each kind.
pub fn policy(kind: usize, figure: u32) -> Policy {
    let load = figure << 20;
    let (degradation, dpf, distance) = ((figure % 2 + 1) << 20, 1 << 19, figure % 3);
    match kind {
        0 => Policy::RoundRobin,
        1 => Policy::WeightedRoundRobin { weight: figure },
        2 => Policy::Priority { priority: figure },
        3 => Policy::LeastUsed { load },
        4 => Policy::LeastUsedDegradation { load, degradation },
        5 => Policy::PriorityLeastUsed { load, degradation },
        6 => Policy::PriorityLeastUsedDegradation {
            load,
            degradation: figure << 19,
        },
        7 => Policy::LeastUsedDpf {
            load,
            dpf,
            distance,
        },
        8 => Policy::LeastUsedDegradationDpf {
            load,
            degradation,
            dpf,
            distance,
        },
        9 => Policy::PriorityLeastUsedDpf {
            load,
            degradation,
            dpf,
            distance,
        },
        10 => Policy::PriorityLeastUsedDegradationDpf {
            load,
            degradation: figure << 18,
            dpf,
            distance,
        },
        // Loads up to the highest, for which sums exceed 32 bits.
        _ => Policy::LeastUsedDegradation {
            load: u32::MAX - figure,
            degradation: u32::MAX,
        },
    }
}

/// Returns the sorting key without the sequence number: smaller keys come first. None if the element is never selected.
fn key(e: &Element) -> Option<(u128, u128)> {
    let sum = |terms: &[u128]| (terms.iter().sum::<u128>(), 0);
    let n = u128::from(e.selections);
    let w = u128::from;
    Some(match e.policy {
        Policy::RoundRobin => (0, 0),
        Policy::WeightedRoundRobin { weight: 0 } => return None,
        Policy::WeightedRoundRobin { weight } => (
            u128::from(e.round),
            ((2 * u128::from(e.turns) + 1) << 15) / w(weight),
        ),
        Policy::Priority { priority } => (u128::MAX - w(priority), 0),
        Policy::LeastUsed { load } => sum(&[w(load)]),
        Policy::LeastUsedDegradation { load, degradation } => sum(&[w(load), n * w(degradation)]),
        Policy::PriorityLeastUsed { load, degradation } => sum(&[w(load), w(degradation)]),
        Policy::PriorityLeastUsedDegradation { load, degradation } => {
            sum(&[w(load), n * w(degradation), w(degradation)])
        }
        Policy::LeastUsedDpf {
            load,
            dpf,
            distance,
        } => sum(&[w(load), w(dpf) * w(distance)]),
        Policy::LeastUsedDegradationDpf {
            load,
            degradation,
            dpf,
            distance,
        } => sum(&[w(load), n * w(degradation), w(dpf) * w(distance)]),
        Policy::PriorityLeastUsedDpf {
            load,
            degradation,
            dpf,
            distance,
        } => sum(&[w(load), w(degradation), w(dpf) * w(distance)]),
        Policy::PriorityLeastUsedDegradationDpf {
            load,
            degradation,
            dpf,
            distance,
        } => sum(&[
            w(load),
            n * w(degradation),
            w(degradation),
            w(dpf) * w(distance),
        ]),
        _ => unreachable!("a random policy"),
    })
}

fn counts_every_selection(policy: &Policy) -> bool {
    matches!(
        policy,
        Policy::LeastUsedDegradation { .. }
            | Policy::PriorityLeastUsedDegradation { .. }
            | Policy::LeastUsedDegradationDpf { .. }
            | Policy::PriorityLeastUsedDegradationDpf { .. }
    )
}

impl ReferenceModel {
    pub fn has_pool(&self, pool: usize) -> bool {
        self.elements.iter().any(|e| e.pool == pool)
    }

    /// Registers an element; returns the previous payload, or none if refused.
    pub fn register(
        &mut self,
        pool: usize,
        id: u32,
        home: u32,
        policy: Policy,
        class: u32,
        payload: usize,
    ) -> Option<Option<usize>> {
        let mut peers = self.elements.iter().filter(|e| e.pool == pool);
        if peers.any(|e| e.class != class) {
            return None;
        }
        let sequence = self.next_sequence(pool);
        let round = self.current_round(pool);
        let Some(e) = self.find(pool, id) else {
            self.elements.push(Element {
                pool,
                id,
                home,
                class,
                policy,
                payload,
                timer: None,
                sequence,
                selections: 0,
                round,
                turns: 0,
            });
            return Some(None);
        };
        let before = key(e);
        e.home = home;
        if let Policy::WeightedRoundRobin { weight } = policy {
            if before.is_none() {
                (e.round, e.turns) = (round, 0);
            }
            e.turns = e.turns.min(u64::from(weight.saturating_sub(1)));
        }
        e.policy = policy;
        e.selections = 0;
        if key(e) != before {
            e.sequence = sequence;
        }
        Some(Some(std::mem::replace(&mut e.payload, payload)))
    }

    /// Sets another distance, if the policy has one, and then returns the policy.
    pub fn set_distance(&mut self, pool: usize, id: u32, to: u32) -> Option<Policy> {
        let next = self.next_sequence(pool);
        let e = self.find(pool, id)?;
        let before = key(e);
        match &mut e.policy {
            Policy::LeastUsedDpf { distance, .. }
            | Policy::LeastUsedDegradationDpf { distance, .. }
            | Policy::PriorityLeastUsedDpf { distance, .. }
            | Policy::PriorityLeastUsedDegradationDpf { distance, .. } => *distance = to,
            _ => {}
        }
        if key(e) != before {
            e.sequence = next;
        }
        Some(e.policy)
    }

    pub fn deregister(&mut self, pool: usize, id: u32) -> Option<usize> {
        let at = self
            .elements
            .iter()
            .position(|e| e.pool == pool && e.id == id)?;
        Some(self.elements.remove(at).payload)
    }

    pub fn rehome(&mut self, pool: usize, id: u32, home: u32) {
        if let Some(e) = self.find(pool, id) {
            e.home = home;
        }
    }

    pub fn resolve(&mut self, pool: usize, items: usize) -> Vec<u32> {
        let mut order: Vec<_> = self.elements.iter().filter(|e| e.pool == pool).collect();
        order.retain(|e| key(e).is_some());
        order.sort_by_key(|e| (key(e), e.sequence));
        let chosen: Vec<u32> = order.iter().take(items).map(|e| e.id).collect();
        for (index, &id) in chosen.iter().enumerate() {
            let sequence = self.next_sequence(pool);
            let Some(e) = self.find(pool, id) else {
                continue;
            };
            if index == 0 || counts_every_selection(&e.policy) {
                e.sequence = sequence;
                e.selections += 1;
                e.turns += 1;
                if let Policy::WeightedRoundRobin { weight } = e.policy
                    && e.turns >= u64::from(weight)
                {
                    (e.round, e.turns) = (e.round + 1, 0);
                }
            }
        }
        chosen
    }

    pub fn set_timer(&mut self, pool: usize, id: u32, at: Option<u64>) {
        if let Some(e) = self.find(pool, id) {
            e.timer = at;
        }
    }

    pub fn first_timer(&self) -> Option<u64> {
        self.elements.iter().filter_map(|e| e.timer).min()
    }

    pub fn expire(&mut self, now: u64) -> Vec<(u64, usize, u32)> {
        let due = self
            .elements
            .iter_mut()
            .filter(|e| e.timer.is_some_and(|at| at <= now));
        due.map(|e| (e.timer.take().unwrap(), e.pool, e.id))
            .collect()
    }

    fn find(&mut self, pool: usize, id: u32) -> Option<&mut Element> {
        self.elements
            .iter_mut()
            .find(|e| e.pool == pool && e.id == id)
    }

    /// Equation 1 of paper 001: one more than the largest in the pool.
    fn next_sequence(&self, pool: usize) -> u64 {
        let pool = self.elements.iter().filter(|e| e.pool == pool);
        pool.map(|e| e.sequence).max().map_or(0, |s| s + 1)
    }

    fn current_round(&self, pool: usize) -> u64 {
        let pool = self
            .elements
            .iter()
            .filter(|e| e.pool == pool && key(e).is_some());
        pool.map(|e| e.round).min().unwrap_or(0)
    }
}

/// RFC 5353 section 3.6.2, computed from all blocks.
pub fn checksum<'a>(elements: impl Iterator<Item = (&'a [u8], u32)>) -> u16 {
    let mut bytes = Vec::new();
    for (handle, id) in elements {
        bytes.extend_from_slice(handle);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes.extend_from_slice(&id.to_be_bytes());
    }
    let mut sum = 0u32;
    for word in bytes.chunks(2) {
        sum += u32::from(u16::from_be_bytes([word[0], word[1]]));
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}
