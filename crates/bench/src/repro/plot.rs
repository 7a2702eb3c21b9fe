//! Curves with confidence intervals, as SVG.

use super::experiment_outcome::ResultRow;
use anyhow::{Result, anyhow};
use holdfast_sim::Estimate;
use plotters::coord::Shift;
use plotters::coord::ranged1d::{Ranged, ValueFormatter};
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;
use std::path::Path;

/// Width and height of a panel in pixels.
const PANEL_PIXELS: (u32, u32) = (720, 520);
/// Panels beside each other.
const COLUMNS: usize = 2;

/// A figure of a paper, one or more panels.
#[derive(Clone, Debug)]
pub struct Figure {
    /// Title above all panels.
    pub title: String,
    /// Panels in order, two beside each other.
    pub panels: Vec<Panel>,
}

/// A panel: one pair of axes.
#[derive(Clone, Debug)]
pub struct Panel {
    /// Title above the panel, and the beginning of its points' names.
    pub title: String,
    /// Quantity along the abscissa, such as `elements`.
    pub x: String,
    /// Quantity along the ordinate, which was measured.
    pub y: String,
    /// Unit of the measured quantity.
    pub unit: String,
    /// True for a logarithmic ordinate, for series that are far apart. Every mean must then be above 0.
    pub y_log: bool,
    /// Curves of the panel.
    pub series: Vec<Series>,
}

/// One curve of a panel.
#[derive(Clone, Debug)]
pub struct Series {
    /// Name in the legend and in the points' names.
    pub name: String,
    /// Points from left to right.
    pub points: Vec<Point>,
}

/// One point of a curve.
#[derive(Clone, Copy, Debug)]
pub struct Point {
    /// Position on the abscissa.
    pub x: f64,
    /// Value that was measured here.
    pub ours: Estimate,
    /// Value in the paper's text.
    pub paper: Option<f64>,
}

impl Figure {
    /// Returns every point, in order.
    #[must_use]
    pub fn rows(&self) -> Vec<ResultRow> {
        let mut rows = Vec::new();
        for panel in &self.panels {
            for series in &panel.series {
                for point in &series.points {
                    let place =
                        format!("{}: {}, {} {}", panel.title, series.name, point.x, panel.x);
                    rows.push(ResultRow::new(place, point.paper, point.ours, &panel.unit));
                }
            }
        }
        rows
    }

    /// Writes the figure to a file. Crosses show the values in the paper's text.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        // The library's file backend borrows the path in its error, and panics if an error is not reported: so the file
        // is written here.
        let svg = self.svg()?;
        std::fs::write(path, svg)?;
        Ok(())
    }

    fn svg(&self) -> Result<String> {
        let mut svg = String::new();
        let columns = self.panels.len().clamp(1, COLUMNS);
        let rows = self.panels.len().div_ceil(columns).max(1);
        let size = (
            PANEL_PIXELS.0 * columns as u32,
            PANEL_PIXELS.1 * rows as u32 + 40,
        );
        {
            let root = SVGBackend::with_string(&mut svg, size).into_drawing_area();
            root.fill(&WHITE).map_err(drawing_error)?;
            let below = root
                .titled(&self.title, ("sans-serif", 24))
                .map_err(drawing_error)?;
            let areas = below.split_evenly((rows, columns));
            for (panel, area) in self.panels.iter().zip(&areas) {
                panel.draw(area)?;
            }
            root.present().map_err(drawing_error)?;
        }
        Ok(svg)
    }
}

fn drawing_error(error: impl std::fmt::Display) -> anyhow::Error {
    anyhow!("cannot draw the plot: {error}")
}

type DrawingPanel<'a> = DrawingArea<SVGBackend<'a>, Shift>;

impl Panel {
    fn points(&self) -> impl Iterator<Item = &Point> {
        self.series.iter().flat_map(|series| &series.points)
    }

    fn draw(&self, area: &DrawingPanel<'_>) -> Result<()> {
        let x_max = self.points().map(|point| point.x).fold(1.0, f64::max);
        let x = 0.0..x_max * 1.05;
        let values = || {
            self.points()
                .flat_map(|p| [Some(interval_high(p)), p.paper])
                .flatten()
        };
        let highest = values().fold(f64::MIN_POSITIVE, f64::max);
        // Space above the curves for the legend.
        let legend = 0.1 + 0.05 * self.series.len() as f64;
        let mut builder = ChartBuilder::on(area);
        builder
            .caption(&self.title, ("sans-serif", 18))
            .margin(12)
            .x_label_area_size(44)
            .y_label_area_size(72);
        if self.y_log {
            let least = self.points().flat_map(|p| [Some(p.ours.mean), p.paper]);
            let y_min = least.flatten().fold(highest, f64::min) / 2.0;
            let y_max = highest * (highest / y_min).powf(legend);
            let y = (y_min..y_max).log_scale();
            self.draw_curves(builder.build_cartesian_2d(x, y).map_err(drawing_error)?)
        } else {
            let y = 0.0..highest * (1.0 + legend);
            self.draw_curves(builder.build_cartesian_2d(x, y).map_err(drawing_error)?)
        }
    }

    fn draw_curves<'a, Y>(
        &self,
        mut chart: ChartContext<'a, SVGBackend<'a>, Cartesian2d<RangedCoordf64, Y>>,
    ) -> Result<()>
    where
        Y: Ranged<ValueType = f64> + ValueFormatter<f64>,
    {
        chart
            .configure_mesh()
            .light_line_style(WHITE)
            .x_desc(&self.x)
            .y_desc(format!("{} ({})", self.y, self.unit))
            .draw()
            .map_err(drawing_error)?;
        for (index, series) in self.series.iter().enumerate() {
            let color = Palette99::pick(index).to_rgba();
            let means = series.points.iter().map(|point| (point.x, point.ours.mean));
            chart
                .draw_series(LineSeries::new(means, color.stroke_width(2)))
                .map_err(drawing_error)?
                .label(&series.name)
                .legend(move |(x, y)| {
                    PathElement::new([(x, y), (x + 18, y)], color.stroke_width(2))
                });
            let bars = series.points.iter().map(|p| {
                ErrorBar::new_vertical(
                    p.x,
                    interval_low(p, self.y_log),
                    p.ours.mean,
                    interval_high(p),
                    color.filled(),
                    8,
                )
            });
            chart.draw_series(bars).map_err(drawing_error)?;
            let paper_points = series.points.iter().filter_map(|p| Some((p.x, p.paper?)));
            let crosses = paper_points.map(|at| Cross::new(at, 6, color.stroke_width(2)));
            chart.draw_series(crosses).map_err(drawing_error)?;
        }
        if self.points().any(|point| point.paper.is_some()) {
            let no_points = std::iter::empty::<Cross<(f64, f64), i32>>();
            chart
                .draw_series(no_points)
                .map_err(drawing_error)?
                .label("stated in the paper")
                .legend(|(x, y)| Cross::new((x + 9, y), 6, BLACK.stroke_width(2)));
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperLeft)
            .background_style(WHITE.mix(0.8))
            .border_style(BLACK)
            .draw()
            .map_err(drawing_error)
    }
}

fn interval_high(point: &Point) -> f64 {
    point.ours.mean + point.ours.ci95.unwrap_or(0.0)
}

/// Returns the low end of the interval; a logarithmic axis cannot show an interval that reaches 0.
fn interval_low(point: &Point, y_log: bool) -> f64 {
    let low = point.ours.mean - point.ours.ci95.unwrap_or(0.0);
    if y_log && low <= 0.0 {
        point.ours.mean
    } else {
        low
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(y_log: bool) -> Figure {
        let point = |x: f64, paper| Point {
            x,
            ours: Estimate::from_repeats(&[x, x * 2.0]),
            paper,
        };
        let panel = Panel {
            title: "left".to_owned(),
            x: "elements".to_owned(),
            y: "load".to_owned(),
            unit: "%".to_owned(),
            y_log,
            series: vec![
                Series {
                    name: "a < b".to_owned(),
                    points: vec![point(1000.0, None), point(2000.0, Some(90.0))],
                },
                Series {
                    name: "second".to_owned(),
                    points: vec![point(500.0, None)],
                },
            ],
        };
        Figure {
            title: "Figure".to_owned(),
            panels: vec![panel.clone(), panel.clone(), panel],
        }
    }

    #[test]
    fn every_point_yields_a_row() {
        let rows = figure(false).rows();
        assert_eq!(rows.len(), 9);
        assert_eq!(rows[1].point, "left: a < b, 2000 elements");
        assert_eq!((rows[1].paper, rows[1].ours), (Some(90.0), 3000.0));
        assert_eq!((rows[0].paper, rows[0].unit.as_str()), (None, "%"));
    }

    #[test]
    fn plot_contains_curves_intervals_and_names() {
        for y_log in [false, true] {
            let svg = figure(y_log).svg().unwrap();
            assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
            // One line per curve in each panel; the line of a single point is not visible.
            assert!(svg.matches("<polyline").count() >= 3, "{svg}");
            for text in ["Figure", "a &lt; b", "second", "stated in the paper"] {
                assert!(svg.contains(text), "{text} is missing");
            }
        }
    }
}
