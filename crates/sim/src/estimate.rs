//! Estimates from repeated measurements: a mean with its error.

use statrs::distribution::{ContinuousCDF, StudentsT};

/// A mean with its 95 % confidence interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// The mean of the repeats.
    pub mean: f64,
    /// Half the width of the interval around `mean`, by Student's t distribution. None for a single repeat.
    pub ci95: Option<f64>,
}

impl Estimate {
    /// Computes the estimate from independent repeats of one measurement. Without repeats, the mean is NaN.
    #[must_use]
    pub fn from_repeats(repeats: &[f64]) -> Estimate {
        let count = repeats.len() as f64;
        let mean = repeats.iter().sum::<f64>() / count;
        let degrees_of_freedom = count - 1.0;
        let ci95 = StudentsT::new(0.0, 1.0, degrees_of_freedom)
            .ok()
            .map(|student| {
                let squares: f64 = repeats.iter().map(|value| (value - mean).powi(2)).sum();
                student.inverse_cdf(0.975) * (squares / degrees_of_freedom / count).sqrt()
            });
        Estimate { mean, ci95 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_near(value: f64, wanted: f64) -> bool {
        (value - wanted).abs() < 1e-3
    }

    #[test]
    fn interval_follows_students_t() {
        // The quantile at 0.975 with 4 degrees of freedom is 2.7764; the deviation is 1.5811, over the root of 5.
        let estimate = Estimate::from_repeats(&[1.0, 2.0, 3.0, 4.0, 5.0]);
        assert!(is_near(estimate.mean, 3.0));
        assert!(is_near(estimate.ci95.unwrap(), 1.9632), "{estimate:?}");
        // With 17 degrees of freedom, for the 18 repeats of paper 001, the quantile is 2.1098.
        let repeats: Vec<f64> = (0..18).map(f64::from).collect();
        let wanted = 2.1098 * (28.5f64 / 18.0).sqrt();
        assert!(is_near(
            Estimate::from_repeats(&repeats).ci95.unwrap(),
            wanted
        ));
    }

    #[test]
    fn single_repeat_gives_no_interval() {
        let one = Estimate::from_repeats(&[7.0]);
        assert_eq!((one.mean, one.ci95), (7.0, None));
        assert_eq!(Estimate::from_repeats(&[7.0, 7.0]).ci95, Some(0.0));
    }
}
