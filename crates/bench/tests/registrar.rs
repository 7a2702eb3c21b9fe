//! The registrar benchmark and the experiments based on it, with few elements and users and short runs, but with real
//! registrars, elements and users in processes of their own. The tests check that all operations are carried, not how
//! fast.

use std::path::Path;
use std::process::Command;

use holdfast_testbed::cluster::find_program;
use serde_json::Value;

/// Runs `holdfast` and returns the report that it wrote with `--json`.
fn run_holdfast(words: &str, json: &Path) -> Value {
    let program = find_program("holdfast").expect("the command line");
    let mut command = Command::new(program);
    command.args(words.split(' ')).arg("--json").arg(json);
    let output = command.output().expect("it runs");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{words}: {errors}");
    let text = std::fs::read_to_string(json).expect("the file");
    serde_json::from_str(&text).expect("JSON")
}

fn row_number(row: &Value, key: &str) -> f64 {
    let value = row[key].as_f64();
    value.unwrap_or_else(|| panic!("{key} is no number: {row}"))
}

#[test]
fn every_load_completes_without_lost_operation() {
    let directory = tempfile::tempdir().expect("a directory");
    // The benchmark itself checks that every request has an answer, and that the registrars have counted as many
    // requests.
    let report = run_holdfast(
        "bench registrar --divide 200 --associations 6 --milliseconds 150 --rounds 2 --registrars 1,3 --policy LU",
        &directory.path().join("registrar.json"),
    );
    assert_eq!(report["bench"], "registrar");
    let echo = report["echo"].as_array().expect("echoes");
    assert_eq!(echo.len(), 2);
    assert!(
        echo.iter()
            .all(|echo| row_number(echo, "operations_per_s") > 0.0)
    );
    let rows = report["rows"].as_array().expect("rows");
    // Five loads, each with 1 and with 3 registrars; the last load runs again without the single send to all peers, and
    // again with each re-registration announced.
    assert_eq!(rows.len(), 12, "{rows:#?}");
    for row in rows {
        assert!(row_number(row, "cpu_share") > 0.0, "{row}");
        let has_many_registrars = row_number(row, "registrars") > 1.0;
        assert_eq!(
            row["sync_registrar_cpu_share"].is_number(),
            has_many_registrars,
            "{row}"
        );
        let has_users = row_number(row, "users") > 0.0;
        assert_eq!(
            row_number(row, "resolutions_per_s") > 0.0,
            has_users,
            "{row}"
        );
        let has_reregistrations = row_number(row, "reregistrations_per_s") > 0.0;
        assert!(has_reregistrations || has_users, "{row}");
    }
    let at_saturation = |row: &&Value| row["share_of_echo"].is_number();
    assert_eq!(rows.iter().filter(at_saturation).count(), 2);
    let separate_send_rows = rows.iter().filter(|row| row["one_send"] == false);
    assert_eq!(separate_send_rows.count(), 1);
    let announce_each_rows = rows.iter().filter(|row| row["announce_each"] == true);
    assert_eq!(announce_each_rows.count(), 1);
}

#[test]
fn external_registrar_is_benchmarked() {
    let directory = tempfile::tempdir().expect("a directory");
    let refused = Command::new(find_program("holdfast").expect("the command line"))
        .args(["bench", "registrar", "--external", "127.0.0.1:3863"])
        .output()
        .expect("it runs");
    let errors = String::from_utf8_lossy(&refused.stderr);
    assert!(errors.contains("--pid <PID>"), "{errors}");
    let text = format!(
        "[registrar]\nlisten = [\"127.0.0.1\"]\nasap_port = 0\nenrp_port = 0\nraw = false\nencapsulation_port = 0\nrun_dir = {:?}\n",
        directory.path()
    );
    let config = directory.path().join("registrar.toml");
    std::fs::write(&config, text).expect("a file");
    let mut daemon = Command::new(find_program("rserpoold").expect("the daemon"))
        .args(["registrar", "--config"])
        .arg(&config)
        .spawn()
        .expect("it runs");
    let client =
        holdfast_api::control::BlockingControlClient::new(directory.path().join("registrar.sock"))
            .expect("a client");
    let status = (0..6000).find_map(|_| {
        std::thread::sleep(std::time::Duration::from_millis(10));
        client.run(|client| client.registrar()).ok()
    });
    let status = status.expect("a registrar");
    let (at, udp) = (status.asap[0], status.encapsulation_port.unwrap_or(0));
    let words = format!(
        "bench registrar --external {at} --external-udp {udp} --pid {} --load reregistrations,paper-users --divide 200 --associations 4 --milliseconds 100 --rounds 2",
        daemon.id()
    );
    let report = run_holdfast(&words, &directory.path().join("registrar.json"));
    let elements_left = client
        .run(|client| client.registrar())
        .expect("a registrar");
    daemon.kill().expect("killed");
    daemon.wait().expect("its end");
    assert_eq!(report["rows"].as_array().expect("rows").len(), 2);
    assert_eq!(elements_left.elements, 0, "the elements have deregistered");
    assert!(elements_left.counters.resolutions > 0 && elements_left.counters.reregistrations > 0);
}

#[test]
fn figures_8_and_9_have_all_points_and_curves() {
    let directory = tempfile::tempdir().expect("a directory");
    let plot = directory.path().join("plot.svg");
    // Factors of the number of points: the intervals; the monitored registrars, sizes, or registrars in scope; the
    // policies.
    for (figure, points) in [("fig8", 3 * (2 + 2 * 6 - 1)), ("fig9", 2 * 2 * 3 * 2)] {
        let words = format!(
            "repro rserpool-overhead/{figure} --sizes 4 --elements 5 --repeats 3 --milliseconds 40 --plot {}",
            plot.display()
        );
        let report = run_holdfast(&words, &directory.path().join("repro.json"));
        assert_eq!(report["repro"], format!("rserpool-overhead/{figure}"));
        let rows = report["rows"].as_array().expect("rows");
        assert_eq!(rows.len(), points, "{rows:#?}");
        for row in rows {
            assert!(row_number(row, "ours") >= 0.0 && row_number(row, "ci95") >= 0.0);
            // The paper measured none of these points.
            assert!(
                row["paper"].is_null() && row["unit"] == "% of a core",
                "{row}"
            );
        }
        let svg = std::fs::read_to_string(&plot).expect("a plot");
        assert!(svg.starts_with("<svg") && svg.contains("every 250 ms"));
    }
}

#[test]
fn experiments_are_listed() {
    let directory = tempfile::tempdir().expect("a directory");
    let listed = run_holdfast("repro list", &directory.path().join("list.json"));
    let listed = listed.as_array().expect("a list");
    let names: Vec<_> = listed
        .iter()
        .filter_map(|each| each["name"].as_str())
        .collect();
    assert!(names.contains(&"rserpool-overhead/fig8"), "{names:?}");
    assert!(names.contains(&"rserpool-overhead/fig9"), "{names:?}");
}
