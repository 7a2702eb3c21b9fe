//! The load of this node: for the pool policies of services, for operators and for metrics.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use holdfast_api::control::{
    ErrorBody, LoadReportEntry, LoadReportRequest, LoadWithdrawRequest, LoadWithdrawn,
    NodeLoadEntry, NodeLoadStatus, ProcessLoadEntry,
};
use holdfast_bpf::shared_with_c::{FlowState, MAX_SERVICES};
use holdfast_wire::Protocol;

use super::Engine;
use super::operator_view::error_body;
use crate::load::{
    LoadReports, LoadSampler, MeasurementRequest, NewReport, NewestMeasurement, NodeMeasurement,
    ReportRefusal, ReportSubject, Reporter, process_subject,
};

/// Weight of the newest measurement in the mean, as a divisor.
const SMOOTHING_DIVISOR: f64 = 4.0;

/// The newest measurement of this host, and the loads that programs report.
#[derive(Debug, Default)]
pub struct NodeLoad {
    /// Thread that measures the load; none before the start.
    sampler: Option<LoadSampler>,
    newest: Option<NewestMeasurement>,
    reports: LoadReports,
    /// Demand for processor time as a share of the capacity, 0 to 1, as a mean over the last measurements.
    busy: Option<f64>,
}

impl NodeLoad {
    /// Starts to measure, with the privileges of the calling thread.
    ///
    /// # Errors
    /// There is no memory for a thread.
    pub fn start(&mut self, interface: &str) -> std::io::Result<()> {
        self.sampler = Some(LoadSampler::start(interface)?);
        Ok(())
    }

    /// Returns the newest measurement; none before the second one after the start.
    pub fn measurement(&self) -> Option<&NodeMeasurement> {
        self.newest.as_ref().map(|newest| &newest.node)
    }

    /// Returns the processes that listen at services, each with the services.
    pub fn servers(&self) -> impl Iterator<Item = (i32, &BTreeSet<SocketAddr>)> {
        let servers = self.newest.as_ref().map(|newest| &newest.servers);
        let servers = servers.into_iter().flatten();
        servers.map(|(pid, services)| (*pid, services))
    }

    /// Takes the newest measurement, and requests the next one.
    pub fn update(&mut self, now: Duration, mut request: MeasurementRequest) {
        self.reports.remove_ended(now);
        let Some(sampler) = &self.sampler else {
            return;
        };
        if let Some(newest) = sampler.take_newest() {
            let busy = (newest.node.demand().utilization().points() / 100.0).min(1.0);
            let mean = self.busy.unwrap_or(busy);
            self.busy = Some(mean + (busy - mean) / SMOOTHING_DIVISOR);
            let started = |pid: i32| newest.node.trees.get(&pid).map(|tree| tree.started_ticks);
            self.reports.remove_ended_processes(started);
            self.newest = Some(newest);
        }
        let reported = self
            .reports
            .iter()
            .filter_map(|(subject, ..)| subject.pid());
        request.roots.extend(reported);
        sampler.request(request);
    }

    /// Returns the load, 0 to 1: the greatest of the demand for processor time as a share of the capacity, the used part
    /// of the flow table, and the shares of a full load that programs report. None before the load is known.
    pub fn share(&self, flows: u32, flow_capacity: u32) -> Option<f64> {
        let busy = match (&self.sampler, self.busy) {
            (Some(_), busy) => busy?,
            (None, _) => 0.0,
        };
        let used = f64::from(flows) / f64::from(flow_capacity.max(1));
        let reported = self.reports.greatest_share().unwrap_or(0.0);
        Some(busy.max(used).max(reported).clamp(0.0, 1.0))
    }

    fn report_entries(&self, now: Duration) -> Vec<LoadReportEntry> {
        let entry =
            |(subject, name, report): (&ReportSubject, &_, &crate::load::Report)| LoadReportEntry {
                name: ToString::to_string(name),
                pid: subject.pid(),
                value: report.value,
                full_at: report.full_at,
                ends_in_s: report.until.saturating_sub(now).as_secs(),
            };
        self.reports.iter().map(entry).collect()
    }
}

impl Engine {
    /// Takes the newest measurement of the load, and requests the next one.
    pub(super) fn update_load(&mut self) {
        let services = self
            .config
            .services
            .iter()
            .filter(|service| service.protocol == Protocol::Tcp && !service.is_ending);
        let programs = self.programs.iter();
        let request = MeasurementRequest {
            roots: programs
                .filter_map(|program| i32::try_from(program.pid).ok())
                .chain(self.conductor.pids())
                .collect(),
            parents: self.migrations.restorers(),
            services: services.map(|service| service.address).collect(),
        };
        let now = self.now();
        self.node_load.update(now, request);
        let share = self.load_share();
        let metrics = self.statistics.metrics();
        if let (Some(measured), Some(share)) = (self.node_load.measurement(), share) {
            metrics.set_load(measured, share);
        }
        metrics.set_load_reports(self.node_load.reports.iter());
    }

    /// Returns this node's load, 0 to 1; `None` before it is known.
    pub(super) fn load_share(&self) -> Option<f64> {
        self.node_load
            .share(self.quota_flows(), self.config.node.capacity)
    }

    fn quota_flows(&self) -> u32 {
        let quota = &self.dataplane.programs.flow_quota;
        let flows = (0..MAX_SERVICES as u16).map(|row| quota.flows(row));
        flows.fold(0, u32::saturating_add)
    }

    /// Returns the load of this node and of its processes.
    pub(super) fn load_status(&self) -> NodeLoadStatus {
        let node = self.node_load.measurement().zip(self.load_share());
        let node = node.map(|(measured, share)| NodeLoadEntry {
            load: share,
            cpu_millis: measured.cpu_millis,
            demand_millis: measured.demand().used,
            capacity_millis: measured.capacity_millis,
            waiting_millis: measured.waiting_millis,
            memory_used_kib: measured.memory_used_kib,
            memory_free_kib: measured.memory_free_kib,
            received_bytes_s: measured.received_bytes_s,
            sent_bytes_s: measured.sent_bytes_s,
            flows: self.quota_flows(),
            flow_capacity: self.config.node.capacity,
        });
        NodeLoadStatus {
            node: self.config.node.name.clone(),
            load: node,
            processes: self.process_loads(),
            reports: self.node_load.report_entries(self.now()),
        }
    }

    fn process_loads(&self) -> Vec<ProcessLoadEntry> {
        let Some(measured) = self.node_load.measurement() else {
            return Vec::new();
        };
        let clients = self.client_counts();
        let loads = measured.trees.iter().map(|(pid, load)| ProcessLoadEntry {
            pid: *pid,
            name: load.name.clone(),
            cpu_millis: load.cpu_millis,
            demand_millis: measured.demand_of(load.cpu_millis),
            waiting_millis: load.waiting_millis,
            memory_kib: load.memory_kib,
            processes: load.processes,
            threads: load.threads,
            clients: clients.get(pid).copied(),
        });
        loads.collect()
    }

    /// Returns the number of clients of each server: the flows of a program with a session, the connections of the
    /// services at which another process listens. Servers that share a service have an equal part each.
    pub(super) fn client_counts(&self) -> BTreeMap<i32, u64> {
        let mut by_service: BTreeMap<SocketAddr, u64> = BTreeMap::new();
        for (flow, state, _) in self.dataplane.flows() {
            if state == FlowState::Owned && flow.protocol == Protocol::Tcp {
                *by_service.entry(flow.local).or_default() += 1;
            }
        }
        let mut servers: BTreeMap<SocketAddr, u64> = BTreeMap::new();
        for (_, services) in self.node_load.servers() {
            for service in services {
                *servers.entry(*service).or_default() += 1;
            }
        }
        let mut counts = BTreeMap::new();
        for (pid, services) in self.node_load.servers() {
            let part = |service| {
                let clients = by_service.get(service).copied().unwrap_or(0);
                clients / servers.get(service).copied().unwrap_or(1).max(1)
            };
            counts.insert(pid, services.iter().map(part).fold(0, u64::saturating_add));
        }
        for program in self.programs.iter() {
            if let Ok(pid) = i32::try_from(program.pid) {
                counts.insert(pid, program.flow_count() as u64);
            }
        }
        counts
    }

    /// Keeps a load that a program reports.
    pub(super) fn report_load(
        &mut self,
        request: LoadReportRequest,
        uid: Option<u32>,
    ) -> Result<LoadReportEntry, ErrorBody> {
        let now = self.now();
        let (subject, name) = subject_of(&request.name, request.pid)?;
        let entry_name = request.name;
        let new = NewReport {
            name,
            subject,
            value: request.value,
            full_at: request.full_at,
            validity: request.for_s.map(Duration::from_secs),
        };
        let report = self.node_load.reports.report(now, Reporter { uid }, new);
        let report = report.map_err(|refusal| refusal_body(&refusal))?;
        Ok(LoadReportEntry {
            name: entry_name,
            pid: request.pid,
            value: report.value,
            full_at: report.full_at,
            ends_in_s: report.until.saturating_sub(now).as_secs(),
        })
    }

    /// Ends a load report before its time, by request.
    pub(super) fn withdraw_load(
        &mut self,
        request: &LoadWithdrawRequest,
        uid: Option<u32>,
    ) -> Result<LoadWithdrawn, ErrorBody> {
        let now = self.now();
        let key = subject_of(&request.name, request.pid)?;
        let withdrawn = self.node_load.reports.withdraw(now, Reporter { uid }, key);
        let was_valid = withdrawn.map_err(|refusal| refusal_body(&refusal))?;
        Ok(LoadWithdrawn { was_valid })
    }
}

fn subject_of(
    name: &str,
    pid: Option<i32>,
) -> Result<(ReportSubject, crate::load::LoadName), ErrorBody> {
    let name = name.parse().map_err(|refusal| refusal_body(&refusal))?;
    let subject = pid.map_or(Ok(ReportSubject::Node), process_subject);
    Ok((subject.map_err(|refusal| refusal_body(&refusal))?, name))
}

fn refusal_body(refusal: &ReportRefusal) -> ErrorBody {
    let remedy = match refusal {
        ReportRefusal::BadName
        | ReportRefusal::BadValue
        | ReportRefusal::BadFullAt
        | ReportRefusal::BadValidity => "change the report",
        ReportRefusal::NoProcess(_) => "name the PID of a running process of this host",
        ReportRefusal::NotOwner { .. } => "name the PID of an own process, or ask root to report",
        ReportRefusal::TooMany(_) => "withdraw reports that are not needed, or let them end",
    };
    error_body(refusal.to_string(), remedy)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a load with a measured share of processor time and without reports.
    fn busy_load(busy: f64) -> NodeLoad {
        NodeLoad {
            sampler: LoadSampler::start("lo").ok(),
            busy: Some(busy),
            ..NodeLoad::default()
        }
    }

    #[test]
    fn greatest_share_is_the_load() {
        let mut load = busy_load(0.25);
        assert_eq!(load.share(0, 100), Some(0.25));
        assert_eq!(load.share(75, 100), Some(0.75));
        assert_eq!(load.share(500, 100), Some(1.0));
        let new = NewReport {
            name: "players".parse().expect("a name"),
            subject: ReportSubject::Node,
            value: 16.0,
            full_at: Some(32.0),
            validity: None,
        };
        let root = Reporter { uid: Some(0) };
        (load.reports.report(Duration::ZERO, root, new)).expect("taken");
        assert_eq!(load.share(0, 100), Some(0.5));
        // The report has ended.
        load.update(Duration::from_secs(60), MeasurementRequest::default());
        assert_eq!(load.share(0, 100), Some(0.25));
    }

    #[test]
    fn load_is_unknown_at_first() {
        let mut load = NodeLoad::default();
        load.start("lo").expect("a thread");
        assert_eq!(load.share(1, 2), None);
        let started = std::time::Instant::now();
        while load.measurement().is_none() {
            assert!(
                started.elapsed() < Duration::from_secs(60),
                "exceeded time: a load"
            );
            load.update(started.elapsed(), MeasurementRequest::default());
            std::thread::sleep(Duration::from_millis(20));
        }
        assert!(load.share(1, 2) >= Some(0.5));
    }
}
