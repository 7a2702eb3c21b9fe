//! Loads that programs report themselves, such as players or sessions. A report ends unless it is repeated in time.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Maximum number of reports of a node.
const REPORTS_MAX: usize = 1024;
/// Maximum number of reports about one process, or about the node as a whole.
const REPORTS_PER_SUBJECT_MAX: usize = 16;
/// Maximum number of reports of one ordinary user.
const REPORTS_PER_USER_MAX: usize = 256;
/// Validity of a report that names none.
const DEFAULT_VALIDITY: Duration = Duration::from_secs(30);
/// Longest validity of a report.
const VALIDITY_MAX: Duration = Duration::from_secs(86_400);
/// Largest value of a report: larger numbers have no exact double.
const VALUE_MAX: f64 = 9_007_199_254_740_992.0;

/// Name of a reported load: 1 to 32 of `a-z`, `0-9` and `_`, beginning with a letter.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct LoadName(String);

impl fmt::Display for LoadName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for LoadName {
    type Err = ReportRefusal;

    fn from_str(text: &str) -> Result<LoadName, ReportRefusal> {
        let is_allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        let is_valid = (1..=32).contains(&text.len())
            && text.starts_with(|first: char| first.is_ascii_lowercase())
            && text.chars().all(is_allowed);
        match is_valid {
            true => Ok(LoadName(text.to_owned())),
            false => Err(ReportRefusal::BadName),
        }
    }
}

/// A process by its PID and its start in ticks since boot, which tells processes with the same PID apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ProcessInstance {
    /// The PID in the daemon's namespace.
    pub pid: i32,
    /// Field 22 of `/proc/PID/stat`.
    pub started_ticks: u64,
}

/// Subject of a load report: the node or one of its processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ReportSubject {
    /// The node as a whole.
    Node,
    /// One process.
    Process(ProcessInstance),
}

impl ReportSubject {
    /// Returns the PID of the process; `None` for the node.
    pub fn pid(&self) -> Option<i32> {
        match self {
            ReportSubject::Node => None,
            ReportSubject::Process(process) => Some(process.pid),
        }
    }
}

/// Reason for which a report is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReportRefusal {
    /// The name is invalid.
    #[error("a load's name has 1 to 32 of a-z, 0-9 and _, and begins with a letter")]
    BadName,
    /// The value is no count.
    #[error("the value of a load is a number from 0 to 2^53")]
    BadValue,
    /// The value at which the subject is full is not above 0.
    #[error("the value at which a process is full is a number above 0, up to 2^53")]
    BadFullAt,
    /// The validity is out of range.
    #[error("a report is valid for 1 s to 86400 s")]
    BadValidity,
    /// There is no such process.
    #[error("there is no process {0}")]
    NoProcess(i32),
    /// An ordinary user reported about the node or about another user's process.
    #[error("user {uid} may report loads of own processes only")]
    NotOwner {
        /// Number of the user.
        uid: u32,
    },
    /// A limit on the number of reports is reached.
    #[error("{0}")]
    TooMany(&'static str),
}

/// The caller of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reporter {
    /// Number of the user; none if the kernel does not say.
    pub uid: Option<u32>,
}

impl Reporter {
    /// Refuses a subject about which the caller may not report: root may report about everything, an ordinary user about
    /// own processes.
    ///
    /// # Errors
    /// [`ReportRefusal::NotOwner`], also for a process that cannot be seen.
    pub fn check_rights(self, subject: &ReportSubject) -> Result<(), ReportRefusal> {
        let uid = self.uid.unwrap_or(u32::MAX);
        let owner = match subject {
            _ if uid == 0 => return Ok(()),
            ReportSubject::Node => None,
            ReportSubject::Process(process) => owner_of(process.pid),
        };
        match owner == Some(uid) && self.uid.is_some() {
            true => Ok(()),
            false => Err(ReportRefusal::NotOwner { uid }),
        }
    }
}

/// A load report that is valid.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Report {
    /// The value, in the reporter's unit.
    pub value: f64,
    /// Value at which the subject takes no more load.
    pub full_at: Option<f64>,
    /// End of the validity, on the clock of the calls.
    pub until: Duration,
    uid: Option<u32>,
}

#[cfg(test)]
impl Report {
    /// Returns a report that never ends.
    pub fn of_value(value: f64) -> Report {
        Report {
            value,
            full_at: None,
            until: Duration::MAX,
            uid: Some(0),
        }
    }
}

/// A load report to keep.
#[derive(Debug, Clone, PartialEq)]
pub struct NewReport {
    /// The load's name.
    pub name: LoadName,
    /// What the report is about.
    pub subject: ReportSubject,
    /// The value, in the reporter's unit.
    pub value: f64,
    /// Value at which the subject takes no more load.
    pub full_at: Option<f64>,
    /// Validity; 30 s if absent.
    pub validity: Option<Duration>,
}

/// The valid reports, in bounded number.
#[derive(Debug, Default)]
pub struct LoadReports {
    reports: BTreeMap<(ReportSubject, LoadName), Report>,
}

impl LoadReports {
    /// Keeps a report, in place of an earlier one of the same name about the same subject.
    ///
    /// # Errors
    /// The report is invalid, the caller may not make it, or there are too many.
    pub fn report(
        &mut self,
        now: Duration,
        reporter: Reporter,
        new: NewReport,
    ) -> Result<Report, ReportRefusal> {
        if !(0.0..=VALUE_MAX).contains(&new.value) {
            return Err(ReportRefusal::BadValue);
        }
        if new
            .full_at
            .is_some_and(|full| !(f64::MIN_POSITIVE..=VALUE_MAX).contains(&full))
        {
            return Err(ReportRefusal::BadFullAt);
        }
        let validity = new.validity.unwrap_or(DEFAULT_VALIDITY);
        if !(Duration::from_secs(1)..=VALIDITY_MAX).contains(&validity) {
            return Err(ReportRefusal::BadValidity);
        }
        reporter.check_rights(&new.subject)?;
        self.remove_ended(now);
        let key = (new.subject, new.name);
        if !self.reports.contains_key(&key) {
            self.check_limits(reporter, &new.subject)?;
        }
        let report = Report {
            value: new.value,
            full_at: new.full_at,
            until: now.saturating_add(validity),
            uid: reporter.uid,
        };
        self.reports.insert(key, report);
        Ok(report)
    }

    fn check_limits(
        &self,
        reporter: Reporter,
        subject: &ReportSubject,
    ) -> Result<(), ReportRefusal> {
        if self.reports.len() >= REPORTS_MAX {
            return Err(ReportRefusal::TooMany(
                "this node has the maximum of 1024 reports",
            ));
        }
        let about_subject = self.reports.keys().filter(|(other, _)| other == subject);
        if about_subject.count() >= REPORTS_PER_SUBJECT_MAX {
            let text = "there are 16 reports about this process already, which is the maximum";
            return Err(ReportRefusal::TooMany(text));
        }
        let of_user = self
            .reports
            .values()
            .filter(|report| report.uid == reporter.uid);
        if reporter.uid != Some(0) && of_user.count() >= REPORTS_PER_USER_MAX {
            return Err(ReportRefusal::TooMany(
                "this user has the maximum of 256 reports",
            ));
        }
        Ok(())
    }

    /// Ends a report. Returns false if there was none.
    ///
    /// # Errors
    /// The caller may not report about the subject.
    pub fn withdraw(
        &mut self,
        now: Duration,
        reporter: Reporter,
        (subject, name): (ReportSubject, LoadName),
    ) -> Result<bool, ReportRefusal> {
        reporter.check_rights(&subject)?;
        self.remove_ended(now);
        Ok(self.reports.remove(&(subject, name)).is_some())
    }

    /// Removes reports that are out of date. Returns true if there were any.
    pub fn remove_ended(&mut self, now: Duration) -> bool {
        let before = self.reports.len();
        self.reports.retain(|_, report| report.until > now);
        self.reports.len() < before
    }

    /// Removes the reports about processes that have ended. `started_ticks` returns the start of a process that has been
    /// measured a moment ago.
    pub fn remove_ended_processes(&mut self, started_ticks: impl Fn(i32) -> Option<u64>) {
        self.reports.retain(|(subject, _), _| match subject {
            ReportSubject::Node => true,
            ReportSubject::Process(process) => match started_ticks(process.pid) {
                Some(started) => started == process.started_ticks,
                None => process_subject(process.pid).as_ref() == Ok(subject),
            },
        });
    }

    /// Returns the valid reports.
    pub fn iter(&self) -> impl Iterator<Item = (&ReportSubject, &LoadName, &Report)> {
        (self.reports.iter()).map(|((subject, name), report)| (subject, name, report))
    }

    /// Returns the greatest share of a full load that a report tells, 0 to 1; `None` if no report says when its subject
    /// is full.
    pub fn greatest_share(&self) -> Option<f64> {
        let shares = self.reports.values().filter_map(|report| {
            let share = report.value / report.full_at?;
            Some(share.min(1.0))
        });
        shares.reduce(f64::max)
    }
}

/// Returns a running process by its PID, as a subject.
///
/// # Errors
/// [`ReportRefusal::NoProcess`].
pub fn process_subject(pid: i32) -> Result<ReportSubject, ReportRefusal> {
    let stat = std::fs::read(format!("/proc/{pid}/stat")).unwrap_or_default();
    let started_ticks = started_ticks(&String::from_utf8_lossy(&stat));
    started_ticks
        .map(|started_ticks| ReportSubject::Process(ProcessInstance { pid, started_ticks }))
        .ok_or(ReportRefusal::NoProcess(pid))
}

/// Parses the start of a process, field 22 of `stat` (proc_pid_stat(5)); none for one that has ended.
fn started_ticks(stat: &str) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(')')?;
    let mut words = rest.split_ascii_whitespace();
    let is_running = !matches!(words.next()?, "Z" | "X");
    words.nth(18)?.parse().ok().filter(|_| is_running)
}

/// Returns the user of a process: the effective one, whose rights the process has.
fn owner_of(pid: i32) -> Option<u32> {
    let status = std::fs::read(format!("/proc/{pid}/status")).ok()?;
    let status = String::from_utf8_lossy(&status);
    let users = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    // Real, effective, saved and file system user. A process of several users belongs to none of them.
    let mut users = users.split_ascii_whitespace().map(str::parse::<u32>);
    let (real, effective) = (users.next()?.ok()?, users.next()?.ok()?);
    (real == effective).then_some(real)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOT: Reporter = Reporter { uid: Some(0) };
    const USER: Reporter = Reporter { uid: Some(4711) };
    const NOW: Duration = Duration::from_secs(100);

    fn process(pid: i32) -> ReportSubject {
        ReportSubject::Process(ProcessInstance {
            pid,
            started_ticks: 5,
        })
    }

    fn players(subject: ReportSubject, value: f64) -> NewReport {
        NewReport {
            name: "players".parse().expect("a name"),
            subject,
            value,
            full_at: None,
            validity: None,
        }
    }

    #[test]
    fn names_are_validated() {
        for name in ["players", "a", "open_sessions_2", &"x".repeat(32)] {
            assert_eq!(
                name.parse::<LoadName>().map(|name| name.to_string()),
                Ok(name.to_owned())
            );
        }
        for name in [
            "",
            "Players",
            "2x",
            "_x",
            "a-b",
            "a b",
            "a\"",
            "ä",
            &"x".repeat(33),
        ] {
            assert_eq!(
                name.parse::<LoadName>(),
                Err(ReportRefusal::BadName),
                "{name}"
            );
        }
    }

    #[test]
    fn report_ends_unless_repeated() {
        let mut reports = LoadReports::default();
        let report = |reports: &mut LoadReports, now, value| {
            let new = players(ReportSubject::Node, value);
            reports.report(now, ROOT, new).expect("taken")
        };
        assert_eq!(report(&mut reports, NOW, 5.0).until, NOW + DEFAULT_VALIDITY);
        let repeated = NOW + Duration::from_secs(20);
        report(&mut reports, repeated, 7.0);
        assert!(!reports.remove_ended(NOW + DEFAULT_VALIDITY));
        let values: Vec<f64> = reports.iter().map(|(.., report)| report.value).collect();
        assert_eq!(values, [7.0]);
        assert!(reports.remove_ended(repeated + DEFAULT_VALIDITY));
        assert_eq!(reports.iter().count(), 0);
    }

    #[test]
    fn invalid_reports_are_refused() {
        let mut reports = LoadReports::default();
        let mut try_report = |change: fn(&mut NewReport)| {
            let mut new = players(ReportSubject::Node, 1.0);
            change(&mut new);
            reports.report(NOW, ROOT, new).map(|_| ())
        };
        use ReportRefusal::{BadFullAt, BadValidity, BadValue};
        assert_eq!(try_report(|new| new.value = -1.0), Err(BadValue));
        assert_eq!(try_report(|new| new.value = f64::NAN), Err(BadValue));
        assert_eq!(try_report(|new| new.value = f64::INFINITY), Err(BadValue));
        assert_eq!(try_report(|new| new.full_at = Some(0.0)), Err(BadFullAt));
        assert_eq!(
            try_report(|new| new.full_at = Some(f64::NAN)),
            Err(BadFullAt)
        );
        assert_eq!(
            try_report(|new| new.validity = Some(Duration::ZERO)),
            Err(BadValidity)
        );
        assert_eq!(
            try_report(|new| new.validity = Some(Duration::MAX)),
            Err(BadValidity)
        );
        assert_eq!(try_report(|_| ()), Ok(()));
    }

    #[test]
    fn number_of_reports_is_bounded() {
        let mut reports = LoadReports::default();
        let named = |number: usize, subject| NewReport {
            name: format!("load{number}").parse().expect("a name"),
            ..players(subject, 1.0)
        };
        let one = process(1);
        for number in 0..REPORTS_PER_SUBJECT_MAX {
            reports
                .report(NOW, ROOT, named(number, one))
                .expect("taken");
        }
        let refused = reports.report(NOW, ROOT, named(99, one));
        assert!(
            matches!(refused, Err(ReportRefusal::TooMany(_))),
            "{refused:?}"
        );
        // A known report can always be repeated.
        reports.report(NOW, ROOT, named(0, one)).expect("taken");
        let mut taken = REPORTS_PER_SUBJECT_MAX;
        for pid in 2.. {
            let result = reports.report(NOW, ROOT, named(0, process(pid)));
            if result.is_err() {
                break;
            }
            taken += 1;
        }
        assert_eq!(taken, REPORTS_MAX);
        let later = NOW + DEFAULT_VALIDITY;
        reports
            .report(later, ROOT, named(99, one))
            .expect("room after the end of others");
        assert_eq!(reports.iter().count(), 1);
    }

    #[test]
    fn ordinary_users_report_about_own_processes_only() {
        let own = i32::try_from(std::process::id()).expect("a PID");
        let subject = process_subject(own).expect("this process runs");
        let uid = owner_of(own);
        assert_eq!(Reporter { uid }.check_rights(&subject), Ok(()));
        let refused = Err(ReportRefusal::NotOwner { uid: 4711 });
        assert_eq!(USER.check_rights(&subject), refused);
        assert_eq!(USER.check_rights(&ReportSubject::Node), refused);
        assert_eq!(USER.check_rights(&process(i32::MAX)), refused);
        assert!(Reporter { uid: None }.check_rights(&subject).is_err());
        let mut reports = LoadReports::default();
        let new = players(subject, 3.0);
        let key = (subject, new.name.clone());
        assert!(reports.report(NOW, USER, new.clone()).is_err());
        reports.report(NOW, ROOT, new).expect("taken");
        assert!(reports.withdraw(NOW, USER, key.clone()).is_err());
        assert_eq!(reports.withdraw(NOW, ROOT, key.clone()), Ok(true));
        assert_eq!(reports.withdraw(NOW, ROOT, key), Ok(false));
    }

    #[test]
    fn process_is_known_by_pid_and_start() {
        for pid in [0, -1, i32::MAX] {
            assert_eq!(process_subject(pid), Err(ReportRefusal::NoProcess(pid)));
        }
        let mut reports = LoadReports::default();
        reports
            .report(NOW, ROOT, players(process(7), 3.0))
            .expect("taken");
        reports
            .report(NOW, ROOT, players(process(8), 4.0))
            .expect("taken");
        reports.remove_ended_processes(|pid| (pid == 8).then_some(5));
        let pids: Vec<Option<i32>> = reports.iter().map(|(subject, ..)| subject.pid()).collect();
        assert_eq!(pids, [Some(8)]);
        // Another process has the PID.
        reports.remove_ended_processes(|_| Some(6));
        assert_eq!(reports.iter().count(), 0);
        assert_eq!(started_ticks("7 (a) S (b)) Z 4 5"), None);
    }

    #[test]
    fn fullest_subject_decides_the_share() {
        let mut reports = LoadReports::default();
        let full_at = |full_at, value, pid| NewReport {
            full_at,
            ..players(process(pid), value)
        };
        reports
            .report(NOW, ROOT, full_at(None, 500.0, 1))
            .expect("taken");
        assert_eq!(reports.greatest_share(), None);
        reports
            .report(NOW, ROOT, full_at(Some(32.0), 8.0, 2))
            .expect("taken");
        assert_eq!(reports.greatest_share(), Some(0.25));
        reports
            .report(NOW, ROOT, full_at(Some(10.0), 20.0, 3))
            .expect("taken");
        assert_eq!(reports.greatest_share(), Some(1.0));
    }
}
