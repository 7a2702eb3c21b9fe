//! A scenario of a replicated service.

use super::group_scenario::{GroupScenario, invalid, set_if_given, shares};
use super::{KindName, ScenarioError};
use crate::node_group::CountRange;
use crate::replication;
use crate::time::Time;
use serde::Deserialize;

/// A replicated service.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ReplicationScenarioText {
    #[serde(rename = "kind")]
    _kind: KindName,
    #[serde(default)]
    pub(super) about: String,
    legs: Option<CountRange>,
    clients: Option<CountRange>,
    incidents: Option<CountRange>,
    runtime_s: Option<f64>,
    deadline_s: Option<f64>,
    lossy: Option<f64>,
    loss: Option<f64>,
    reorder: Option<f64>,
    all_may_fail: Option<f64>,
    contact_lost: Option<f64>,
    second_fault: Option<f64>,
    #[serde(default)]
    fault: FaultWeightsText,
}

#[derive(Debug, Deserialize, Default)]
#[serde(deny_unknown_fields)]
struct FaultWeightsText {
    kill: Option<u32>,
    kill_worker: Option<u32>,
    stop: Option<u32>,
    lose_host: Option<u32>,
    cut: Option<u32>,
    slow: Option<u32>,
    differ: Option<u32>,
}

impl ReplicationScenarioText {
    pub(super) fn replication(&self) -> Result<GroupScenario, ScenarioError> {
        let mut setting = replication::DEFAULT;
        set_if_given(&mut setting.legs, self.legs);
        set_if_given(&mut setting.clients, self.clients);
        set_if_given(&mut setting.incidents, self.incidents);
        let seconds = |given: Option<f64>| given.map(Time::from_secs_f64);
        set_if_given(&mut setting.runtime, seconds(self.runtime_s));
        set_if_given(&mut setting.deadline, seconds(self.deadline_s));
        let probabilities = [
            (&mut setting.lossy, self.lossy),
            (&mut setting.loss, self.loss),
            (&mut setting.reorder, self.reorder),
            (&mut setting.all_may_fail, self.all_may_fail),
            (&mut setting.contact_lost, self.contact_lost),
            (&mut setting.second_fault, self.second_fault),
        ];
        for (probability, given) in probabilities {
            shares(given.as_slice())?;
            set_if_given(probability, given);
        }
        let weights = [
            (&mut setting.kill, self.fault.kill),
            (&mut setting.kill_worker, self.fault.kill_worker),
            (&mut setting.stop, self.fault.stop),
            (&mut setting.lose_host, self.fault.lose_host),
            (&mut setting.cut, self.fault.cut),
            (&mut setting.slow, self.fault.slow),
            (&mut setting.differ, self.fault.differ),
        ];
        let mut sum = 0u64;
        for (weight, given) in weights {
            set_if_given(weight, given);
            sum += u64::from(*weight);
        }
        if !(1..=1_000_000).contains(&sum) {
            return invalid("the values of [fault] must add up to 1 to 1000000");
        }
        if !setting.legs.is_within(1, 4) || !setting.clients.is_within(1, 100) {
            return invalid("legs must be 1 to 4, clients 1 to 100");
        }
        if !setting.incidents.is_within(0, 1_000) {
            return invalid("incidents must be 0 to 1000");
        }
        if setting.runtime == Time::ZERO || setting.deadline <= setting.runtime {
            return invalid("runtime_s must be above 0, and deadline_s above runtime_s");
        }
        let setting = Box::new(setting);
        Ok(GroupScenario::Replication { setting, bug: None })
    }
}
