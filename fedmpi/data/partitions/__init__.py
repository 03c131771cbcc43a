"""How one data set is split over clients: pure functions of one column, number of clients and seed."""
