//! The workload of a handlespace, the same for every implementation.

use holdfast_wire::rserpool::Policy;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

/// Policies that can be measured, with the names of RFC 5356 and rsplib.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
#[clap(rename_all = "UPPER")]
#[allow(missing_docs)]
pub enum PolicyName {
    Rr,
    Wrr,
    Rand,
    Wrand,
    Prio,
    Lu,
    Lud,
    Plu,
    Rlu,
    #[value(name = "LU-DPF")]
    LuDpf,
    #[value(name = "WRAND-DPF")]
    WrandDpf,
}

/// An element: the number of its pool, and its id.
#[derive(Debug, Clone, Copy)]
pub struct WorkloadElement {
    /// Number of the pool, from 0.
    pub pool: u32,
    /// Id, random.
    pub id: u32,
}

/// Elements of a policy, and an endless supply of random batches.
#[derive(Debug)]
pub struct Workload {
    /// Registered elements, in random order.
    pub members: Vec<WorkloadElement>,
    pools: u32,
    policy: PolicyName,
    random: SmallRng,
    next: usize,
    /// Number of ids that have been assigned.
    ids_assigned: u32,
}

/// Levels of load, weight and distance.
const POLICY_VALUE_LEVELS: u32 = 16;

impl PolicyName {
    /// Returns the name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            PolicyName::Rr => "RR",
            PolicyName::Wrr => "WRR",
            PolicyName::Rand => "RAND",
            PolicyName::Wrand => "WRAND",
            PolicyName::Prio => "PRIO",
            PolicyName::Lu => "LU",
            PolicyName::Lud => "LUD",
            PolicyName::Plu => "PLU",
            PolicyName::Rlu => "RLU",
            PolicyName::LuDpf => "LU-DPF",
            PolicyName::WrandDpf => "WRAND-DPF",
        }
    }

    /// Returns the policy with random values: one of sixteen loads, priorities or weights, and one of sixteen
    /// distances.
    pub fn random_policy(self, random: &mut impl Rng) -> Policy {
        let level = random.random_range(0..POLICY_VALUE_LEVELS);
        let load = level * (u32::MAX / POLICY_VALUE_LEVELS);
        let distance = random.random_range(0..POLICY_VALUE_LEVELS) * 10;
        let (weight, degradation, dpf) = (level + 1, 1 << 20, 1 << 22);
        match self {
            PolicyName::Rr => Policy::RoundRobin,
            PolicyName::Wrr => Policy::WeightedRoundRobin { weight },
            PolicyName::Rand => Policy::Random,
            PolicyName::Wrand => Policy::WeightedRandom { weight },
            PolicyName::Prio => Policy::Priority { priority: level },
            PolicyName::Lu => Policy::LeastUsed { load },
            PolicyName::Lud => Policy::LeastUsedDegradation { load, degradation },
            PolicyName::Plu => Policy::PriorityLeastUsed { load, degradation },
            PolicyName::Rlu => Policy::RandomizedLeastUsed { load },
            PolicyName::LuDpf => Policy::LeastUsedDpf {
                load,
                dpf,
                distance,
            },
            PolicyName::WrandDpf => Policy::WeightedRandomDpf {
                weight,
                dpf,
                distance,
            },
        }
    }
}

impl Workload {
    /// Creates elements with random ids, dealt to the pools in turns and put in random order.
    pub fn new(policy: PolicyName, elements: u32, pools: u32) -> Workload {
        let mut random = SmallRng::seed_from_u64(42);
        let member = |i: u32| WorkloadElement {
            pool: i % pools,
            id: pseudorandom_id(i + 1),
        };
        let mut members: Vec<WorkloadElement> = (0..elements).map(member).collect();
        members.shuffle(&mut random);
        Workload {
            members,
            pools,
            policy,
            random,
            next: 0,
            ids_assigned: elements + 1,
        }
    }

    /// Returns every element once, in random order, each with policy values.
    pub fn all_members(&mut self) -> Vec<(WorkloadElement, Policy)> {
        self.next = self.members.len();
        self.next_batch(self.members.len())
    }

    /// Returns up to `count` next elements of the random order, each with policy values; shuffles the order again at
    /// its end.
    pub fn next_batch(&mut self, count: usize) -> Vec<(WorkloadElement, Policy)> {
        if self.next == self.members.len() {
            self.members.shuffle(&mut self.random);
            self.next = 0;
        }
        let end = self.members.len().min(self.next + count);
        let batch = &self.members[self.next..end];
        let figures = batch
            .iter()
            .map(|&m| (m, self.policy.random_policy(&mut self.random)));
        let figures = figures.collect();
        self.next = end;
        figures
    }

    /// Gives the elements of the last batch new ids and policy values: they take the places of removed elements.
    pub fn replace_batch(
        &mut self,
        batch: &[(WorkloadElement, Policy)],
    ) -> Vec<(WorkloadElement, Policy)> {
        let places = &mut self.members[self.next - batch.len()..self.next];
        for place in places.iter_mut() {
            place.id = pseudorandom_id(self.ids_assigned);
            self.ids_assigned = self.ids_assigned.wrapping_add(1);
        }
        let figures = places
            .iter()
            .map(|&m| (m, self.policy.random_policy(&mut self.random)));
        figures.collect()
    }

    /// Returns `count` pools chosen at random, by index.
    pub fn random_pools(&mut self, count: usize) -> Vec<u32> {
        (0..count)
            .map(|_| self.random.random_range(0..self.pools))
            .collect()
    }
}

/// Permutes the numbers in a seemingly random way: different ids stay different, and only 0 becomes 0, which is no id.
fn pseudorandom_id(i: u32) -> u32 {
    let mut x = i.wrapping_mul(0x9e37_79b1);
    x ^= x >> 15;
    x = x.wrapping_mul(0x85eb_ca77);
    x ^ x >> 13
}
